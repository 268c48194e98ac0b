"""The tables of docs/performance.md and the comparison of README.md, from bench/results/*.json. A part that was not measured is
left out."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from tapeless.bench.report import MIB, contender_rows, floor_rows, kernel_rows, part_rows, scaling_rows

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))
from suite import CUDA, CURVE, GENERATION, RESULTS, SCALING, TRAINING

WIDTH = 128
PEERS = ("eager", "compile")  # the baselines; transformers is shown for information

# README.md: a tool, how it gets gradients, how it uses several GPUs, what a resumed run restores, and the contender measured
# for it. Facts are from each tool's own documentation and source.
TOOLS = (
    ("**tapeless**", "by hand, in Python", "no", "everything: the run ends with the same bits", "ours"),
    ("PyTorch, `torch.compile`", "autograd", "DDP, FSDP", "what you save", "compile"),
    ("transformers `Trainer`", "autograd", "DDP, FSDP, DeepSpeed", "weights, optimizer, random state, place in the data", "hf"),
    ("nanoGPT", "autograd", "DDP", "weights, optimizer; other batches", ""),
    ("LitGPT", "autograd", "FSDP", "weights, optimizer, data loader", ""),
    ("torchtitan", "autograd", "FSDP, TP, PP, CP", "weights, optimizer, schedule, data loader", ""),
    ("llm.c", "by hand, in C and CUDA", "data parallel, by NCCL", "everything; bit-perfect is its goal", ""),
)
COMPARED = ("llama-small", "cuda-llama-124m")  # on a CPU and on a GPU


def results(parts: Sequence[str]) -> Iterator[dict[str, Any]]:
    for part in parts:
        file = RESULTS / f"{part}.json"
        if file.exists():
            yield json.loads(file.read_text())


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, numbers to the right; the first row is the heading."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---|" + "--:|" * (len(rows[0]) - 1), *body]) + "\n"


def best(result: dict[str, Any], ours: str | None = None, peer: str | None = None) -> dict[str, Any]:
    """The fastest dtype of ours against the fastest baseline; each restricted to one dtype if given."""
    pairs = [pair for pair in result["ratios"] if pair["peer"].split()[0] in PEERS]
    pairs = [pair for pair in pairs if ours in (None, pair["ours"].split()[1]) and peer in (None, pair["peer"].split()[1])]
    names = {pair["ours"] for pair in pairs}
    hardest = [min((pair for pair in pairs if pair["ours"] == name), key=lambda pair: pair["ratio"]) for name in names]
    return max(hardest, key=lambda pair: pair["ratio"])


def milliseconds(result: dict[str, Any], pair: dict[str, Any], side: str) -> str:
    """The median time of one side of a pair, in the group in which they were compared."""
    wanted = [*pair[side].split(), pair["group"]]
    row = next(row for row in result["contenders"] if [row["contender"], row["dtype"], row["group"]] == wanted)
    return f"{1e3 * row['median_s']:.4g}"


def measured_where(result: dict[str, Any]) -> str:
    m, now = result["machine"], result["conditions"]
    where = now.get("gpu") or f"{m['cores']} cores of an {m['cpu']}"
    return f"Measured on {where}, {now['threads']} threads, torch {m['torch']}.\n"


def overview() -> str:
    """One line per model: the fastest dtype of ours against the best baseline, and float32 against float32."""
    head = ("model", "tokens", "best baseline", "ms", "tapeless", "ms", "speedup", "memory ratio", "float32 speedup")
    rows, last = [head], None
    for last in results(list(TRAINING)):
        pair, alike = best(last), best(last, "float32", "float32")
        name, tokens = f"`{last['name']}`", f"{last['batch_size']}x{last['seq_len']}"
        times = [pair["peer"], milliseconds(last, pair, "peer"), pair["ours"].split()[1], milliseconds(last, pair, "ours")]
        ratio = f"**{pair['ratio']:.2f}** ({' to '.join(f'{x:.2f}' for x in pair['quartiles'])})"
        rows.append((name, tokens, *times, ratio, f"{pair['memory_ratio']:.2f}", f"{alike['ratio']:.2f}"))
    return markdown(rows) + ("\n" + measured_where(last) if last else "")


def compared() -> str:
    """A line per tool; everything measured in bfloat16."""
    measured = list(results(COMPARED))
    head = [f"`{result['name']}`, {device}" for result, device in zip(measured, ("2 CPU cores", "H200"), strict=True)]
    rows = ["| | gradients | several GPUs | a resumed run restores | " + " | ".join(head) + " |", "|---|---|---|---|--:|--:|"]
    for *facts, contender in TOOLS:
        for result in measured:
            speeds = {row["contender"]: row["tokens_per_s"] for row in result["contenders"] if row["dtype"] == "bfloat16"}
            facts.append(f"{speeds[contender]:,.0f}" if contender in speeds else "")
        rows.append(f"| {' | '.join(facts)} |")
    return "\n".join(rows) + "\n"


def comparison(result: dict[str, Any], where: str = "") -> Iterator[str]:
    """Every contender, its memory by part, and the floor, if measured."""
    title = f"{result['name']}{where}: {result['parameters']:,} parameters"
    yield f"### {title}, {result['batch_size']}x{result['seq_len']}\n"
    yield markdown(contender_rows(result))
    yield "Peak memory by part, MiB:\n"
    yield markdown(part_rows(result["contenders"]))
    floors = floor_rows(result)
    if len(floors) > 1:
        yield markdown(floors)
    yield from (f"{fill(f'Left out: {reason}', WIDTH)}\n" for reason in result["left_out"].values())


def models() -> str:
    return "\n".join(block for result in results(list(TRAINING)) for block in comparison(result))


def gpu() -> str:
    compared = [result for result in results(list(CUDA)) if result["kind"] == "training"]
    blocks = [block for result in compared for block in comparison(result, gpu_title(result))]
    return "\n".join([markdown(gpu_rows(compared)), *blocks, *map(measured_where, compared[-1:])])


def gpu_title(result: dict[str, Any]) -> str:
    tuned = any(row["contender"] == "max-autotune" for row in result["contenders"])
    return " on a GPU" + (", with max-autotune" if tuned else "")


def gpu_rows(compared: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each measurement and dtype of ours, against its best bfloat16 baseline."""
    rows = [("model", "tokens", "tapeless", "ms", "best baseline", "ms", "speedup", "memory ratio", "reserved ratio")]
    for result in compared:
        for pair in (verdict for verdict in result["verdicts"] if verdict["among"] == "all"):
            name, tokens = f"`{result['name']}`", f"{result['batch_size']}x{result['seq_len']}"
            dtype = pair["ours"].split()[1]
            times = [dtype, milliseconds(result, pair, "ours"), pair["peer"], milliseconds(result, pair, "peer")]
            reserved = f"{pair['reserved_ratio']:.2f}" if pair.get("reserved_ratio") else ""
            rows.append((name, tokens, *times, f"**{pair['ratio']:.2f}**", f"{pair['memory_ratio']:.2f}", reserved))
    return rows


def kernels() -> str:
    """Time of a GPU step by kernel, in each dtype."""
    blocks = []
    for result in results(list(CUDA)):
        for profile in result.get("profiles", ()):
            blocks.append(
                f"`{result['name']}` in {profile['dtype']}; copy bandwidth {profile['copy_bytes_per_s'] / 1e12:.2f} TB/s:\n"
            )
            blocks.append(markdown(kernel_rows(profile)))
    return "\n".join(blocks)


def curve() -> str:
    """fp8 vs. bfloat16: the mean loss of every hundred steps, and the validation loss."""
    blocks = []
    for result in results([CURVE]):
        rows = [("steps", "bfloat16", "fp8", "difference")]
        for i, (wide, narrow) in enumerate(zip(result["bfloat16"]["train"], result["fp8"]["train"], strict=True)):
            steps = f"{i * result['every']} to {(i + 1) * result['every']}"
            rows.append((steps, f"{wide:.4f}", f"{narrow:.4f}", f"{narrow / wide - 1:+.2%}"))
        for step, wide in result["bfloat16"]["validation"].items():
            narrow = result["fp8"]["validation"][step]
            rows.append((f"validation at {step}", f"{wide:.4f}", f"{narrow:.4f}", f"{narrow / wide - 1:+.2%}"))
        blocks.append(markdown(rows))
    return "\n".join(blocks)


def generation() -> str:
    head = ("model", "contender", "tokens/s", "quartiles, ms a token", "ours is faster by", "peak MiB")
    rows = [head]
    for result in results(list(GENERATION)):
        for row in result["contenders"]:
            name = f"{row['contender']} {row['dtype']}"
            pairs = [pair for pair in result["ratios"] if pair["peer"] == name and pair["ours"].split()[1] == row["dtype"]]
            spread = " to ".join(f"{1e3 * s / result['tokens']:.3g}" for s in row["quartiles_s"])
            faster = f"{pairs[0]['ratio']:.2f}x" if pairs else ""
            speed, peak = f"{row['tokens_per_s']:,.0f}", f"{row['peak_bytes'] / MIB:,.0f}"
            rows.append((f"`{result['name']}`", name, speed, spread, faster, peak))
    return markdown(rows)


def generation_cuda(stored: dict[str, Any]) -> str:
    rates = stored["rates"]
    peers = [name for name in rates[0]["tokens_per_s"] if name not in ("engine", "generate")]
    rows = [("model", "sequences", "sampling", *(f"{name}, tokens/s" for name in ("tapeless", *peers)))]
    for row in rates:
        speeds = [row["tokens_per_s"][name] for name in ("engine", *peers)]
        rows.append((f"`{row['preset']}`", str(row["sequences"]), row["sampling"], *(f"{rate:,.0f}" for rate in speeds)))
    return markdown(rows)


def scaling() -> str:
    return "\n".join(markdown(scaling_rows(result)) for result in results(list(SCALING)))
