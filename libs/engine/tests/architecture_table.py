"""Writes docs/architectures.md from what `test_architectures.py` tests."""

from pathlib import Path

from checkpoints import CASES
from lockstep_engine.architectures import ARCHITECTURES, REFUSED

PAGE = Path(__file__).parents[3] / "docs/architectures.md"
_HEAD = """\
# Architectures

Written by `python libs/engine/tests/architecture_table.py` from what `libs/engine/tests/test_architectures.py` tests.

For each architecture a small random checkpoint is made and computed by `transformers` and by the engine, on the CPU in
float32: the logits of a prompt in two chunks and of single tokens after it are equal (1e-4) on each of the numbers of
ranks (tp) named here, and 32 greedy tokens on one and two. Any tp that divides the attention heads runs; key/value
heads are repeated when there are fewer than ranks. What cannot be split is refused with the reason.

Deterministic: a token gets the same bits alone, in any chunk and beside any neighbours. A rank checks at its start that
this holds on its machine; `status().deterministic` has the answer, and `status().fingerprint` names the bits. Workers
with equal fingerprints continue each other's streams exactly. Where this holds:

| computed by | deterministic | the same fingerprint |
|---|---|---|
| CPU, compiled kernels | yes | on every x86-64 CPU (compared on one machine and on emulated ones, see \
[bench](bench/README.md)), with any number of threads and any setting of torch's libraries |
| CPU, torch | yes, in shapes tested at first use | with the same torch, CPU capability and threads |
| GPU | no: nothing is lost or doubled and draws are the same, but rounding may differ | none |
| GPU, `deterministic: true` | if the self-test at start finds it, as on an H200 | \
with the same GPU architecture, torch and Triton |

The kernels are there if the engine was installed with a C compiler, and in our images; they have builds for AVX-512,
AVX2 and neither. float32, 16-bit weights, several ranks and a compressed KV cache are deterministic alike. Each of
these has a fingerprint of its own.

| architecture (`model_type`) | tp tested | deterministic on the CPU | notes |
|---|---|---|---|
"""
_TAIL = """
Others are refused. Known reasons:

"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(map(_row, sorted(ARCHITECTURES))) + _TAIL + "".join(map(_reason, _reasons()))


def _row(model_type: str) -> str:
    cases = [case for case in CASES.values() if case.model_type == model_type]
    tps = ", ".join(map(str, sorted({tp for case in cases for tp in case.tps})))
    exact = "yes" if all(case.exact for case in cases) else "no"
    return f"| {model_type} | {tps} | {exact} | {ARCHITECTURES[model_type].note} |\n"


def _reasons() -> list[str]:
    return sorted(set(REFUSED.values()))


def _reason(reason: str) -> str:
    names = ", ".join(sorted(name for name, each in REFUSED.items() if each == reason))
    return f"- {reason}: {names}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
