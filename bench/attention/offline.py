"""Compilation of the attention kernels without a GPU: instructions, registers, spills and shared memory.

Triton's wheel includes ptxas and cuobjdump. So a machine without a GPU can find out whether a configuration spills registers,
uses the matrix units, and needs more shared memory than the chip has. A configuration takes about a second.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TOOLS = Path(nvidia.__file__).parent / "bin"
# Names of kernel arguments by type; other names are those of pointers to the element type, or of int32 numbers.
_INT32_POINTERS = (
    "PLACE",
    "SPANS",
    "CU_Q",
    "CU_K",
    "START",
    "STOP",
    "COLUMN_START",
    "COLUMN_STOP",
    "SEES",
    "WORD",
)
_COUNTED_INSTRUCTIONS = ("HGMMA", "HMMA", "FSEL", "FSETP", "ISETP", "SEL")
# Kernel arguments that are None unless a feature uses them.
_OPTIONAL = (
    *("COLUMN_START", "COLUMN_STOP", "SEES", "WORD", "SINK", "GRAD_LSE"),
    *("POSITION", "TIME", "TIME_Q", "TIME_K", "soft_cap"),
)
_FLOATS = ("inner_scale", "outer_scale", "silu_scale", "soft_cap", "steps", "scale")
_SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes of a block, by compute capability


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of ptxas for one kernel.

    Attributes:
        registers: Number of registers of a thread.
        spills: Number of local loads and stores in the machine code.
        shared: Bytes of shared memory.
        matrix: Number of matrix instructions, by name.
        loops: For each innermost loop, whether it masks scores, and its number of compares and selects on the score tile.
        sass: The machine code.
    """

    registers: int
    spills: int
    shared: int
    matrix: dict[str, int]
    loops: list[tuple[bool, int]]
    sass: str


def bench_offline(chips: Sequence[int] = (80, 90), widths: Sequence[int] = (64, 128)) -> dict[str, Any]:
    """Compile the shipped bf16 kernels and return registers, spills and shared memory.

    There is one row for each kernel, width and chip (sm_<chip>).
    """
    rows = []
    for chip in chips:
        for width in widths:
            for kernel in ("forward", "dq", "dkv"):
                compiled = compile_shipped(
                    kernel,
                    chip,
                    width=width,
                    values=width,
                    dtype="bf16",
                    rich=False,
                    features=[],
                    slots=1,
                    silu=False,
                )
                sizes = {name: compiled[name] for name in ("registers", "spills", "shared", "shared_limit")}
                rows.append({"kernel": kernel, "width": width, "chip": chip, **sizes})
        rows += [
            {"kernel": name, "chip": chip, "spills": spills}
            for name, spills in compile_plan_kernels(chip).items()
        ]
    return {"rows": rows, "ratio": {"spills in all": float(sum(row["spills"] for row in rows))}}


def compile_kernel(
    kernel: Any, dtype: str, constants: dict[str, Any], capability: int, options: dict[str, int]
) -> Compiled:
    """Compile a kernel for sm_<capability>.

    Args:
        kernel: The Triton kernel.
        dtype: Element type of its pointers.
        constants: Values of constexprs; an argument with the value None is left out.
        capability: Compute capability of the chip.
        options: Options of Triton's compiler.
    """
    names = kernel.arg_names
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = _infer_type(name, dtype)
        if signature[name].startswith("*") or re.fullmatch(r"[a-z]+_[th]", name):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    binary = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        usage, sass = _dump(cubin, "--dump-resource-usage"), _dump(cubin, "-sass")
    registers = re.search(r"REG:(\d+)", usage)
    assert registers, usage
    return Compiled(
        registers=int(registers.group(1)),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        shared=binary.metadata.shared,
        matrix={
            name: len(re.findall(rf"\b{name}\b", sass))
            for name in ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA", "FFMA")
        },
        loops=find_innermost_loops(binary.asm["ttgir"], (constants.get("BM", 0), constants.get("BN", 0))),
        sass=sass,
    )


def compile_shipped(
    kernel: str,
    chip: int,
    width: int,
    values: int,
    dtype: str,
    rich: bool,
    features: list[str],
    slots: int,
    silu: bool,
) -> dict[str, Any]:
    """Compile a kernel in the configuration that Nonet chooses for a chip.

    Args:
        kernel: "forward", "dq", "dkv" or "bias".
        chip: Compute capability of the chip, such as 90.
        width: Width of the queries and keys.
        values: Width of the values.
        dtype: "fp32", "bf16" or "fp16".
        rich: Whether the configuration is that for masks with additional features, as `select_config` takes it.
        features: Names of the optional kernel arguments that are used.
        slots: Number of intervals of a mask row.
        silu: Whether attention uses SiLU instead of softmax.

    Returns:
        The fields of `Compiled` except the machine code, the limit of shared memory, and the instructions of the loops.
    """
    import torch

    from nonet.attention.kernels import (
        bias_kernel,
        dkv_kernel,
        dq_kernel,
        forward_kernel,
        limit_registers,
        round_to_power_of_two,
    )
    from nonet.attention.plans import select_config

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    config = select_config(max(width, values), dtypes[dtype], chip, rich, silu)
    code, tile = {
        "forward": (forward_kernel, config.forward),
        "dq": (dq_kernel, config.dq),
        "dkv": (dkv_kernel, config.dkv),
        "bias": (bias_kernel, config.dq),
    }[kernel]
    constants: dict[str, Any] = {
        name: None for name in _OPTIONAL if name not in features and name in code.arg_names
    }
    constants |= {
        "SLOTS": slots,
        "S": 4 if kernel == "dkv" else slots,
        "BM": tile.block_q,
        "BN": tile.block_k,
    }
    constants |= {
        "D": width,
        "E": values,
        "WD": round_to_power_of_two(width),
        "WE": round_to_power_of_two(values),
        "SILU": silu,
    }
    if kernel == "bias":
        constants |= {"W": 64, "BT": config.piece}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, **limit_registers(dtypes[dtype])}
    compiled = compile_kernel(code, dtype, constants, chip, options)
    numbers = {name: getattr(compiled, name) for name in ("registers", "spills", "shared", "matrix", "loops")}
    return {**numbers, "shared_limit": get_shared_limit(chip), "machine": count_machine_loops(compiled.sass)}


def compile_plan_kernels(chip: int) -> dict[str, int]:
    """Return the number of spills of each kernel that makes a plan; most are compiled for masks with four slots."""
    from nonet.attention.plans import key_kernel, query_kernel, summary_kernel

    spills = {}
    for kernel, constants in (
        (summary_kernel, {"BN": 64}),
        (query_kernel, {"K": 4, "S": 4, "BM": 64, "BN": 64, "COLUMNS": True}),
        (
            query_kernel,
            {"K": 1, "S": 1, "BM": 128, "BN": 128, "COLUMNS": False, "SUMMARY": None, "HULLS": None},
        ),
        (key_kernel, {"S": 4, "R": 4, "BM": 64}),
    ):
        spills[f"{kernel.__name__} {constants}"] = compile_kernel(
            kernel, "i32", constants, chip, {"num_warps": 1}
        ).spills
    return spills


def find_innermost_loops(ttgir: str, score: tuple[int, int]) -> list[tuple[bool, int]]:
    """Find the innermost loops with a matrix product in Triton's GPU code.

    Args:
        ttgir: The code.
        score: The shape of the score tile.

    Returns:
        For each loop, whether it masks scores, and its number of compares and selects on the score tile.
    """
    loops, lines = [], ttgir.splitlines()
    for index, line in enumerate(lines):
        if "scf.for" not in line:
            continue
        body = _select_loop_body(lines, index)
        if any("scf.for" in inner for inner in body) or not any(
            "dot" in inner or "mma" in inner for inner in body
        ):
            continue
        shapes = "|".join({f"{score[0]}x{score[1]}x", f"{score[1]}x{score[0]}x"})
        mask_operations = sum(
            1 for inner in body if re.search(rf"arith\.(cmp[if]|select)\b.*tensor<(?:{shapes})", inner)
        )
        loops.append((mask_operations > 0, mask_operations))
    return loops


def count_machine_loops(sass: str) -> list[dict[str, int]]:
    """Count the instructions of each innermost loop with matrix products in the machine code: all, and some by name."""
    lines = [
        (int(match.group(1), 16), line)
        for line in sass.splitlines()
        if (match := re.search(r"/\*([0-9a-f]{4,5})\*/", line))
    ]
    # A loop ends with a branch to a lower address.
    jumps = [
        (int(match.group(1), 16), address)
        for address, line in lines
        if (match := re.search(r"\bBRA\b[^;]*?\b0x([0-9a-f]+)", line)) and int(match.group(1), 16) < address
    ]
    loops = []
    for begin, end in jumps:
        if any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in jumps):  # contains another loop
            continue
        body = [line for address, line in lines if begin <= address <= end]
        counts = {name: sum(f" {name}" in line for line in body) for name in _COUNTED_INSTRUCTIONS}
        if counts["HGMMA"] or counts["HMMA"]:
            loops.append({"instructions": len(body), **counts})
    return loops


def get_shared_limit(capability: int) -> int:
    """Return the bytes of shared memory that a block can use on a chip."""
    return _SHARED_LIMITS[capability]


def _select_loop_body(lines: list[str], start: int) -> list[str]:
    """Return the lines between the line `start`, which opens a loop, and its closing brace."""
    indent = len(lines[start]) - len(lines[start].lstrip())
    end = next(i for i in range(start + 1, len(lines)) if lines[i].startswith(" " * indent + "}"))
    return lines[start + 1 : end]


def _infer_type(name: str, dtype: str) -> str:
    """Return the Triton type of a kernel argument."""
    if name in ("TIME_Q", "TIME_K", *_INT32_POINTERS):
        return "*i32"
    if name in ("LSE", "DELTA", "GRAD_LSE", "SINK", "POSITION", "TIME", "PARTIAL", "PARTIAL_TIME"):
        return "*fp32"
    if name in _FLOATS:
        return "fp32"
    return f"*{dtype}" if name.isupper() else "i32"


def _dump(cubin: Path, option: str) -> str:
    """Return the output of cuobjdump for a compiled kernel."""
    command = [str(_TOOLS / "cuobjdump"), option, str(cubin)]
    environment = {**os.environ, "PATH": f"{_TOOLS}:{os.environ.get('PATH', '')}"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
