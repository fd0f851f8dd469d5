"""Every name in README and the documentation exists after `import gradwire` alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = r"(?<!from )(?<!import )(?<!::: )(?<!-m )(?<![\w./-])gradwire(?:\.[A-Za-z_]\w*)+"
MODULES = {"gradwire.testing.contracts"}
"""Named as what to import."""
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("benchmarks/results/*.md"))]

RESOLVE = """
import json, pkgutil, sys
import gradwire
early = [name for name in gradwire.SUBMODULES if f"gradwire.{name}" in sys.modules]
missing = []
def check(act, name):
    try:
        act(name)
    except (AttributeError, ImportError) as error:
        missing.append(f"{name}: {error}")
names = json.load(sys.stdin)
for name in names["names"]:
    check(lambda name: eval(name, {"gradwire": gradwire}), name)
for line in names["imports"]:
    check(lambda line: exec(line, {}), line)
for path in names["paths"]:
    check(pkgutil.resolve_name, path)
print(json.dumps({"early": early, "missing": missing, "dir": dir(gradwire)}))
"""


def found(pattern):
    return sorted({match for page in PAGES for match in re.findall(pattern, page.read_text(), re.MULTILINE)})


def test_every_name_resolves_and_submodules_load_on_first_use():
    names = {
        "names": [name for name in found(NAME) if name not in MODULES],
        "imports": found(r"^(?:from gradwire[\w.]* import [^#(\n]+|import gradwire[\w.]*)"),
        "paths": [*found(r"^::: (\S+)$"), *MODULES],
    }
    assert "gradwire.optim.step_in_backward" in names["names"]
    assert "from gradwire.advisor import Link, measure_compute, predict" in names["imports"]
    assert "gradwire.Hook" in names["paths"]
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE], input=json.dumps(names), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["early"], result["missing"]) == ([], [])
    assert {"advisor", "ddp_comm_hooks", "optim", "report", "testing"} < set(result["dir"])


def test_every_sample_is_python():
    samples = [
        (page.name, text)
        for page in PAGES
        for text in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert len(samples) > 15
    for name, text in samples:
        compile(text, name, "exec")


def test_every_link_between_pages_has_a_target():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!http)([\w./-]*\.md)(?:#([\w-]+))?\)", page.read_text()):
            path = page.parent / target
            assert path.exists(), f"{page.name}: {target}"
            heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert not anchor or anchor in anchors, f"{page.name}: {target}#{anchor}"
