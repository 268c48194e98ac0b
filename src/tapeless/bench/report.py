"""A measurement as text: a table of the contenders, where our memory goes, the floor, and the verdicts.

Tested by: tests/bench/test_report.py."""

from collections.abc import Sequence

from tapeless.bench.summary import Row, named
from tapeless.text import MIB, table
from tapeless.training.run_time import activity_rows, startup_rows, verdict

BUSY = 0.1  # share of all cores that others had during a turn


def text(result: Row) -> str:
    """Whatever was measured."""
    by_kind = {"training": training, "generation": compared, "scaling": scaling, "largest": largest, "kernels": kernels}
    by_kind["run"] = whole_runs
    return by_kind[result["kind"]](result)


def training(result: Row) -> str:
    parts, floors = part_rows(result["contenders"]), floor_rows(result)
    tables = {"peak memory by part, MiB": parts, "what no step can do without": floors}
    return compared(result, [f"{title}\n{table(rows)}" for title, rows in tables.items() if len(rows) > 1])


def compared(result: Row, tables: Sequence[str] = ()) -> str:
    """Contenders side by side; all there is to say of a generation."""
    blocks = [heading(result), table(contender_rows(result)), *tables, verdict_lines(result), closing_lines(result)]
    return "\n\n".join(block for block in blocks if block)


def scaling(result: Row) -> str:
    return f"{heading(result)}\n\n" + table(scaling_rows(result))


def largest(result: Row) -> str:
    rows = [("contender", "rows", "tokens")]
    rows += [(label, f"{n:,}", f"{n * result['seq_len']:,}") for label, n in result["largest_batch"].items()]
    return f"{heading(result)}\n\n{table(rows)}"


def whole_runs(result: Row) -> str:
    blocks = [heading(result)]
    for dtype, found in result["runs"].items():
        blocks += [dtype, table(startup_rows(found)), table(activity_rows(found)), verdict(found)]
    return "\n\n".join(blocks)


def kernels(result: Row) -> str:
    blocks = [heading(result)]
    for profile in result["profiles"]:
        copy = f"{profile['dtype']}; a copy reaches {profile['copy_bytes_per_s'] / 1e12:.2f} TB/s"
        blocks.append(f"{copy}\n{table(kernel_rows(profile))}")
    return "\n\n".join(blocks)


def kernel_rows(profile: Row) -> list[tuple[str, ...]]:
    rows = [("kernel", "calls", "ms", "of the step", "GB", "TB/s", "of a copy")]
    for name, k in profile["kernels"].items():
        moved = ("", "", "")
        if k["bytes"] is not None:
            moved = (f"{k['bytes'] / 1e9:.2f}", f"{k['bytes'] / k['seconds'] / 1e12:.2f}", f"{k['of_copy']:.0%}")
        share = f"{k['seconds'] / profile['step_s']:.1%}"
        rows.append((name.strip("_"), f"{k['calls']:.0f}", f"{1e3 * k['seconds']:.3f}", share, *moved))
    gaps = profile["gaps_s"]
    rows.append(("gaps", "", f"{1e3 * gaps:.3f}", f"{gaps / profile['step_s']:.1%}", "", "", ""))
    return [*rows, ("a step", "", f"{1e3 * profile['step_s']:.3f}", "100.0%", "", "", "")]


def heading(result: Row) -> str:
    m, now = result["machine"], result["conditions"]
    what = {
        "training": f"{result['batch_size']}x{result['seq_len']}, one training step",
        "generation": f"{result['tokens']} tokens, one sequence, greedy",
        "scaling": "one training step at growing length and width",
        "kernels": f"{result['batch_size']}x{result['seq_len']}, a training step kernel by kernel",
        "run": f"{result['batch_size']}x{result['seq_len']}, a run of {result.get('steps', 0):,} steps by the trainer",
        "largest": f"the largest batch of {result['seq_len']} tokens a row",
    }[result["kind"]]
    where = now.get("gpu") or f"{m['cores']} cores of {m['cpu']}"
    lines = [f"{result['name']} ({result['parameters']:,} parameters), {what}"]
    lines.append(f"{where}, {now['threads']} threads, torch {m['torch']}")
    if result["busy"] > BUSY:  # threads that wait for one another also wait for other processes, each contender's differently
        busy = f"THE MACHINE WAS BUSY: others had up to {result['busy']:.0%} of it"
        lines.append(f"{busy}; neither times nor ratios can be trusted")
    return "\n".join(lines)


def contender_rows(result: Row) -> list[tuple[str, ...]]:
    """A line each; contenders of a group are together, and ours is measured again in each."""
    groups = {row["group"] for row in result["contenders"]}
    utilized = any(row.get("mfu") for row in result["contenders"])
    reserving = any(row.get("reserved_bytes") for row in result["contenders"])
    head = ["contender", "ms", "quartiles", "tokens/s", *(["MFU"] if utilized else []), "ours is faster by", "peak MiB"]
    head += [*(["reserved"] if reserving else []), "first step s"]
    rows = [tuple([*(["group"] if len(groups) > 1 else []), *head, *(["cold", "warm"] if "first_steps" in result else [])])]
    for row in result["contenders"]:
        pairs = [pair for pair in result["ratios"] if (pair["peer"], pair["group"]) == (named(row), row["group"])]
        low, high = (f"{1e3 * s:.4g}" for s in row["quartiles_s"])
        cells = [
            *([str(row["group"] + 1)] if len(groups) > 1 else []),
            named(row),
            f"{1e3 * row['median_s']:.4g}",
            f"{low} to {high}",
            f"{row['tokens_per_s']:,.0f}",
            *([f"{row['mfu']:.1%}" if row["mfu"] else "n/a"] if utilized else []),
            ", ".join(f"{pair['ratio']:.2f}x ({pair['ours'].split()[1]})" for pair in pairs),
            f"{row['peak_bytes'] / MIB:,.0f}",
            *([f"{row['reserved_bytes'] / MIB:,.0f}"] if reserving else []),
            f"{row['first_step_s']:.1f}",
        ]
        if "first_steps" in result:
            times = result["first_steps"].get(named(row), {})
            cells += [f"{times[kind]:.1f}" if times else "" for kind in ("cold", "warm")]
        rows.append(tuple(cells))
    return rows


def part_rows(contenders: Sequence[Row]) -> list[tuple[str, ...]]:
    """Where the peak goes; `rest` is what has no name."""
    once = {named(row): row for row in contenders if row["parts_bytes"]}  # ours may be in several groups
    names = dict.fromkeys(part for row in once.values() for part in row["parts_bytes"] if part != "rest")
    rows = [("", *names, "rest", "peak")]
    for label, row in once.items():
        sizes = [row["parts_bytes"].get(part) for part in (*names, "rest")]
        cells = [f"{size / MIB:,.1f}" if size is not None else "" for size in (*sizes, row["peak_bytes"])]
        rows.append((label, *cells))
    return rows


def floor_rows(result: Row) -> list[tuple[str, ...]]:
    """The step's matmuls and the optimizer's bytes alone, and how near ours comes."""
    rows: list[tuple[str, ...]] = [("floor", "ms", "products ms", "GFLOP/s", "optimizer ms", "GB/s", "ours takes")]
    ours = {(row["dtype"], row["group"]): row for row in result["contenders"] if row["contender"] == "ours"}
    for row in result["contenders"]:
        if row["contender"] != "floor":
            continue
        facts, beside = row["facts"], ours.get((row["dtype"], row["group"]))
        rows.append(
            (
                row["dtype"],
                f"{1e3 * row['median_s']:.4g}",
                f"{1e3 * facts['products_s']:.4g}",
                f"{facts['flops'] / facts['products_s'] / 1e9:,.0f}",
                f"{1e3 * facts['optimizer_s']:.4g}",
                f"{facts['optimizer_bytes'] / facts['optimizer_s'] / 1e9:.1f}",
                f"{beside['median_s'] / row['median_s']:.2f} times as long" if beside else "",
            )
        )
    return rows


def verdict_lines(result: Row) -> str:
    lines, said = [], set()
    for v in result["verdicts"]:
        if (v["ours"], v["peer"]) in said:  # the best of all was the best of its dtype
            continue
        said.add((v["ours"], v["peer"]))
        best = "the best peer" if v["among"] == "all" else f"the best {v['peer'].split()[1]} peer"
        low, high = v["quartiles"]
        memory = f", {v['memory_ratio']:.2f} of its memory" if v["memory_ratio"] is not None else ""
        memory += f" ({v['reserved_ratio']:.2f} of what it reserves)" if v["reserved_ratio"] is not None else ""
        spread = f"by rounds {low:.2f} to {high:.2f}"
        lines.append(f"{v['ours']}: {v['ratio']:.2f}x the speed of {best} ({v['peer']}; {spread}){memory}")
    return "\n".join(lines)


def closing_lines(result: Row) -> str:
    lines = [f"left out: {reason}" for reason in result["left_out"].values()]
    lines += [f"NOT THE SAME: {wrong}" for wrong in result["disagreements"]]
    return "\n".join(lines)


def scaling_rows(result: Row) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", "parameters", "dtype", "tokens/s", "floor tokens/s", "of the floor")]
    for point in result["points"]:
        by = {named(row): row["tokens_per_s"] for row in point["contenders"]}
        for dtype in dict.fromkeys(row["dtype"] for row in point["contenders"]):
            ours, floor = by[f"ours {dtype}"], by[f"floor {dtype}"]
            name = f"{point['vary']} = {point['value']}"
            rows.append((name, f"{point['parameters']:,}", dtype, f"{ours:,.0f}", f"{floor:,.0f}", f"{ours / floor:.0%}"))
    return rows
