"""A hook of MkDocs: makes the pages of benchmarks/results a part of the documentation.

In the repository, pages link to each other by their paths, such as `../benchmarks/results/error.md`. These links are
changed to those of the documentation.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

RESULTS = Path("benchmarks", "results")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of benchmarks/results under `results/`."""
    folder = Path(config.config_file_path).parent / RESULTS
    for path in sorted(folder.iterdir()):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of the repository into those of the documentation."""
    return markdown.replace("(../benchmarks/results/", "(results/").replace("(../../docs/", "(../")
