"""Write the tables in README.md and docs/ from what the acceptance scripts measured (results/*.json), docs/errors.md from the
catalogue of errors, and docs/settings.md from the configuration.

python acceptance/tables.py           update every generated region
python acceptance/tables.py --check   exit 1 if a region differs from the results"""

import json
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import harness  # noqa: F401  puts tests/ on the path
import performance_tables

from mutants.run import MutantResult, matrix
from mutants.table import MUTANTS
from tapeless.config import ModelConfig, Sampling, SimpleLMConfig, TrainConfig
from tapeless.errors import CATALOGUE, KINDS

HOME = Path(__file__).resolve().parent
ROOT = HOME.parent


def result(name: str) -> dict[str, Any]:
    return json.loads((HOME / "results" / f"{name}.json").read_text())


def measured_on(machine: dict[str, Any]) -> str:
    return f"Measured on {machine['cores']} cores of an {machine['cpu']}, torch {machine['torch']}."


def number() -> str:
    data = result("gradcheck_presets")
    rows = data["table"]
    worst = max(rows, key=lambda row: row["worst"])
    tensors = sum(row["tensors"] for row in rows)
    full_size = max(row["full_size"] for row in rows)
    return (
        f"**{worst['worst']:.0e}** is the largest relative error of any of {tensors:,} gradient tensors, those of all\n"
        f"{len(rows)} presets with small layers, by complex step and by an autograd reference in float64; at full size, along\n"
        f"three directions, it is {full_size:.0e}. One preset: `tapeless gradcheck --preset {worst['preset']}`. All of them:\n"
        "`python acceptance/run.py gradcheck_presets`.\n"
    )


def presets() -> str:
    data = result("gradcheck_presets")
    lines = [
        "| preset | parameters | tensors | checks | largest error of a tensor | at full size | one step downhill | seconds |",
        "|---|--:|--:|--:|--:|--:|---|--:|",
    ]
    for row in data["table"]:
        step = f"{row['before']:.3f} -> {row['after']:.3f}"
        lines.append(
            f"| `{row['preset']}` | {row['parameters']:,} | {row['tensors']} | {row['checks']} | {row['worst']:.1e} "
            f"| {row['full_size']:.1e} | {step} | {row['seconds']} |"
        )
    return "\n".join([*lines, "", measured_on(data["machine"])]) + "\n"


def memory() -> str:
    data = result("saved_bytes")
    lines = ["| model | tokens | dtype | none | cheap | full |", "|---|---|---|--:|--:|--:|"]
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in data["table"]:
        key = (row["model"], row["tokens"], row["dtype"])
        gap = abs(row["measured"] / row["predicted"] - 1)
        cells.setdefault(key, {})[row["policy"]] = f"{row['measured'] / 2**20:.1f} MiB ({100 * gap:.2f} %)"
    for (model, tokens, dtype), policy in cells.items():
        lines.append(f"| `{model}` | {tokens} | {dtype} | {policy['none']} | {policy['cheap']} | {policy['full']} |")
    fused = result("linear_cross_entropy")
    lines += [
        "",
        "| V = 32000, N = 2048, C = 256 | all logits | peak, fused output matmul and loss | peak, two separate ops |",
    ]
    lines.append("|---|--:|--:|--:|")
    for dtype, peak in fused["peak_bytes"].items():
        logits, together, apart = (n / 2**20 for n in (fused["logits_bytes"][dtype], peak["fused"], peak["apart"]))
        lines.append(f"| {dtype} | {logits:.0f} MiB | {together:.1f} MiB | {apart:.0f} MiB |")
    return "\n".join(lines) + "\n"


def mutants() -> str:
    fine = {record["number"]: record["fine"] for record in result("trains_fine")["mutants"]}
    files = {mutant.number: mutant.file for mutant in MUTANTS}  # a file may have moved since the measurement
    records = [record | {"file": files.get(record["number"], record["file"])} for record in result("mutants_killed")["mutants"]]
    return matrix([MutantResult(**record) for record in records], fine)


def interop() -> str:
    names = ("hugging_face", "continued_elsewhere", "gguf_files")
    theirs, machine = result("hugging_face")["transformers"], measured_on(result("hugging_face")["machine"])
    versions = f"By transformers {theirs} and llama-cpp-python {result('gguf_files')['llama_cpp_python']}."
    return "\n".join([*claims(*names), "", f"{versions} {machine}"]) + "\n"


def fine_tuning() -> str:
    data = result("fine_tuning")
    lines = [
        *claims("fine_tuning"),
        "",
        f"| `{data['preset']}`, {data['tokens']} | trained | a step | memory |",
        "|---|--:|--:|--:|",
    ]
    for way, found in data["table"].items():
        mib = found["peak_bytes"] / 2**20
        lines.append(f"| {way} | {found['trained']:,} | {found['milliseconds']:.0f} ms | {mib:.0f} MiB |")
    about = f"Adapters of rank {data['rank']} on {data['targets']}; memory is the peak above that of the imports."
    return "\n".join([*lines, "", f"{about} {measured_on(data['machine'])}"]) + "\n"


TRAINED = (
    "make_train",
    "zig_command",
    "simplelm_training",
    "markov",
    "cllm_training",
    "shakespeare",
    "stops",
    "random_kills",
    "kill_points",
    "slow_disk",
    "one_writer",
    "guards",
    "cost_of_care",
    "training_options",
    "memory_steady",
)


# Claims are stored with their results. These have been reworded in their scripts since they were last measured; an entry can be
# deleted when its script has been measured again.
REWORDED = {
    "learned by heart": "overfit",
    ", give or take ": " ± ",
    "the literal command on ": "the Zig predecessor's command, unchanged, on ",
    "a text that begins with ": "generation from the prompt ",
    "equal to the unbroken run's, no line of the metrics lost or doubled": (
        "equal to the uninterrupted run's, no metrics line lost or duplicated"
    ),
    "and the end of the run that was let be": "and the final state of the uninterrupted run",
    "--paranoid": "--check-invariants-every",
    ", beside a step: ": ", in addition to a step: ",
    "two stretches of noise in a text of verses": "two spans of noise in a text",
    "before and behind each spike": "before and after each spike",
    "Muon and an average of its weights: hashes and lines as those of the unbroken run": (
        "Muon and averaged weights: hashes and metrics lines equal to the uninterrupted run's"
    ),
    "to the end, each stopped one saved, said and exit 75": "until done, each stopped one saves, logs it and exits with 75",
    "the bytes of the run without a limit, the learning rates among its lines": (
        "same bytes and learning rates as without a limit"
    ),
    "its time in all, start": "its total time, start",
    "logits are the unmerged one's": "logits equal the unmerged one's",
    "the adapters have moved them": "the adapters have changed them",
    "bit for bit as they were, all others not": "bit-identical, all others changed",
    "prompt tokens are no targets": "prompt tokens are not targets",
    ", beside full fine-tuning": ", vs. full fine-tuning",
    ", beside peft": ", vs. peft",
    " odd models: ": " unusual configurations: ",
    "out and in, bit for bit": "export and import, bit for bit",
    "largest difference of a logit by their spread": "largest logit difference relative to the logits' spread",
    "the time of the processor to write it": "the CPU time to write it",
    "looks at the layers of tiny (": "layer statistics of tiny (",
    "every one looked at and reported, and none": "with layer statistics and report at every step, and without",
    "`map` alone, which has ": "`map` alone, which reaches ",
}


def claims(*names: str) -> list[str]:
    """A row per claim of the scripts: the claim, its bound, and the measured value."""
    lines = ["| what | bound | measured |", "|---|---|---|"]
    for name in names:
        for row in result(name)["claims"]:
            cells = [reworded(str(row["claim"])), reworded(str(row["bound"])), str(row["measured"])]
            cells = [cell.replace("|", "/").replace("\n", " ") for cell in cells]
            lines.append("| " + " | ".join(cells) + (" |" if row["ok"] else ", **missed** |"))
    return lines


def measured(*names: str) -> str:
    """The claims of scripts that ran on one machine."""
    return "\n".join([*claims(*names), "", measured_on(result(names[0])["machine"])]) + "\n"


def reworded(text: str) -> str:
    for old, new in REWORDED.items():
        text = text.replace(old, new)
    return text


def logs() -> str:
    stored = result("logs")
    packages = f"wandb {stored['wandb']}, trackio {stored['trackio']}"
    return "\n".join([*claims("logs"), "", f"{measured_on(stored['machine']).removesuffix('.')}, {packages}."]) + "\n"


def start_up() -> str:
    data = result("start_up")
    sources = list(data["table"])
    rows = [("seconds", *sources)]
    for phase in data["table"][sources[0]]:
        rows.append((phase, *(f"{data['table'][source][phase]:.2f}" for source in sources)))
    about = f"`{data['preset']}`, medians of {data['starts']} starts, each phase by itself. {measured_on(data['machine'])}"
    return f"{performance_tables.markdown(rows)}\n{about}\n"


def generation_cuda() -> str:
    stored = result("generation_cuda")
    about = f"Measured on one {stored['gpu']}, torch {stored['machine']['torch']}."
    return f"{performance_tables.generation_cuda(stored)}\n{about}\n"


def run_cuda() -> str:
    """What a step of a run takes beyond that of the benchmark."""
    tables = result("run_speed_cuda")["tables"]
    found, step = tables["run"]["run"], tables["run"]["by_turns"]["bench"]["step_s"]
    rows = [("ms per step", ""), ("the benchmark's step, by turns with the trainer's", f"{1e3 * step:.2f}")]
    rows += [(f"the run: {name}", f"{1e3 * seconds / found['steps']:.2f}") for name, seconds in found["seconds"].items()]
    rows.append(("the run in all", f"{1e3 * found['wall_per_step_s']:.2f}"))
    return performance_tables.markdown(rows)


def training() -> str:
    lines = claims(*TRAINED)
    cllm = result("cllm_training")
    lines += ["", "| CLLM's shape, 4x32 | stated | measured here |", "|---|--:|--:|"]
    for name, stated in cllm["stated_milliseconds"].items():
        lines.append(f"| {name}, milliseconds | {stated} | {cllm['milliseconds'][name]} |")
    lines.append(f"| saved activations, MB | 8.4 | {sum(cllm['saved_bytes'].values()) / 1e6:.1f} |")
    attention, ffn = (cllm["gradient_bytes"][f"0 {part}"] / 1e6 for part in ("attn", "ffn"))
    lines.append(f"| gradients of a layer, attention and feed-forward, MB | 18 and 12 | {attention:.1f} and {ffn:.1f} |")
    lines.append(f"| all gradients, MB | 180 | {sum(cllm['gradient_bytes'].values()) / 1e6:.1f} |")
    return "\n".join([*lines, "", measured_on(cllm["machine"])]) + "\n"


def catalogue() -> str:
    """The tables of docs/errors.md: every known error, then the kinds."""
    lines = ["| code | status | message | cause | fix |", "|---|--:|---|---|---|"]
    for known in CATALOGUE:
        words = (known.message, known.cause, known.fix)
        lines.append(_row(f"`{known.code}`", known.kind.exit_status, *words))
    lines += ["", "| code | status | in Python | any other | fix |", "|---|--:|---|---|---|"]
    for kind in KINDS:
        cause = " ".join((kind.__doc__ or "").split())
        lines.append(_row(f"`{kind.code}`", kind.exit_status, f"`{kind.__name__}`", cause, kind.fix))
    return "\n".join(lines) + "\n"


def settings() -> str:
    """The tables of docs/settings.md: every field of the configuration, with the help text of its flag."""
    blocks = []
    for title, kind in (("model", ModelConfig), ("simplelm", SimpleLMConfig), ("train", TrainConfig), ("sampling", Sampling)):
        blocks += [f"## {title}\n", "| setting | default | |", "|---|---|---|"]
        for field in fields(kind):
            choices = field.metadata["choices"]
            among = f": {', '.join(f'`{choice}`' for choice in choices)}" if choices else ""
            default = str(field.default).lower() if isinstance(field.default, bool) else field.default
            shown = "" if default in (None, "") else f"`{default}`"
            blocks.append(_row(f"`{field.name}`", shown, field.metadata["help"].replace("*", r"\*").replace("`", "") + among))
        blocks.append("")
    return "\n".join(blocks)


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


REGIONS = {
    ("README.md", "number"): number,
    ("README.md", "compared"): performance_tables.compared,
    ("docs/verification.md", "presets"): presets,
    ("docs/verification.md", "memory"): memory,
    ("docs/verification.md", "mutants"): mutants,
    ("docs/measured.md", "measured"): training,
    ("docs/settings.md", "settings"): settings,
    ("docs/errors.md", "catalogue"): catalogue,
    ("docs/data.md", "measured"): partial(measured, "data_prepare"),
    ("docs/report.md", "report"): partial(measured, "report"),
    ("docs/report.md", "logs"): logs,
    ("docs/interop.md", "measured"): interop,
    ("docs/fine_tuning.md", "measured"): fine_tuning,
    ("docs/tutorial_chat.md", "measured"): partial(measured, "chat_tutorial"),
    ("docs/python.md", "measured"): partial(measured, "python_users", "notebook"),
    ("docs/performance.md", "overview"): performance_tables.overview,
    ("docs/performance.md", "start-up"): start_up,
    ("docs/performance.md", "models"): performance_tables.models,
    ("docs/performance.md", "gpu"): performance_tables.gpu,
    ("docs/performance.md", "kernels"): performance_tables.kernels,
    ("docs/performance.md", "curve"): performance_tables.curve,
    ("docs/performance.md", "generation"): performance_tables.generation,
    ("docs/performance.md", "generation-gpu"): generation_cuda,
    ("docs/performance.md", "run-gpu"): run_cuda,
    ("docs/performance.md", "scaling"): performance_tables.scaling,
}


def filled(text: str, region: str, content: str) -> str:
    begin, end = f"<!-- begin: {region} -->\n", f"<!-- end: {region} -->"
    before, rest = text.split(begin)
    return before + begin + content + end + rest.split(end, 1)[1]


def main(check: bool) -> int:
    stale = []
    for (file, region), render in REGIONS.items():
        path = ROOT / file
        text = path.read_text()
        new = filled(text, region, render())
        if new != text:
            stale.append(f"{file}: {region}")
            if not check:
                path.write_text(new)
    if stale:
        print(("stale: " if check else "written: ") + ", ".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
