"""A real Jupyter kernel shows a training in one area that is updated, and a stream of text as it is generated. Needs nbclient
and ipykernel, which are not among the development packages."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from claim import Claims, skip
from training import scratch

CELLS = [
    """
import tapeless
from pathlib import Path
Path("text.txt").write_text("every forward has its backward, and every backward has its judges\\n" * 300)
few = {"num_layers": 1, "seq_len": 32, "max_steps": 300, "eval_every": 100, "sample_tokens": 20}
result = tapeless.train("tiny", "text.txt", out_dir="runs/a", **few)
""",
    """
config = tapeless.TrainConfig(dataset_path="text.txt", seq_len=32, max_steps=300)
data = tapeless.prepare(config, 256, Path("data"))
trainer = tapeless.Trainer(tapeless.Transformer(tapeless.load_preset("tiny")), config, data)
ending = trainer.run()
""",
    """
from threading import Thread
thread = Thread(target=lambda: tapeless.train("tiny", "text.txt", out_dir="runs/b", **few))
thread.start()
thread.join()
""",
    """
for piece in result.model.stream("every ", max_tokens=20):
    print(piece, end="", flush=True)
""",
]
WAYS = ("tapeless.train", "trainer.run()", "tapeless.train in a thread")


def executed(folder: Path) -> tuple[Any, list[tuple[int, str]]]:
    """The notebook with its outputs, and every message that a cell sent, by its kind."""
    import nbformat
    from nbclient import NotebookClient

    class Client(NotebookClient):
        def process_message(self, message: Any, cell: Any, index: int) -> Any:
            sent.append((index, message["header"]["msg_type"]))
            return super().process_message(message, cell, index)

    sent: list[tuple[int, str]] = []
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    Client(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return notebook, sent


def check_progress(claims: Claims, cell: Any, sent: list[str], way: str) -> None:
    areas = [output["data"] for output in cell.outputs if output.output_type == "display_data"]
    shown = areas[0]["text/plain"].splitlines()[1].split() if areas else ["none"]
    ok = len(areas) == 1 and shown[0] == "300" and sent.count("update_display_data") > 1 and "text/html" in areas[0]
    claims.check(
        f"{way}: one area, updated, which ends with the last step",
        bound="1 area, step 300",
        measured=f"{len(areas)} area, {sent.count('update_display_data')} updates, step {shown[0]}",
        ok=ok,
    )
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    ok = "validation" in printed and "tokens/s" not in printed
    claims.check(f"{way}: evaluations are printed, steps are not", bound=True, measured=ok, ok=ok)


if __name__ == "__main__":
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        skip("nbclient and ipykernel are not installed: pip install nbclient ipykernel")
    claims = Claims("notebook")
    with scratch() as folder:
        notebook, sent = executed(folder)
    for i, way in enumerate(WAYS):
        check_progress(claims, notebook.cells[i], [kind for index, kind in sent if index == i], way)
    pieces = [kind for index, kind in sent if index == len(WAYS) and kind == "stream"]
    claims.check("a stream of 20 tokens arrives in pieces", bound="more than 1", measured=len(pieces), ok=len(pieces) > 1)
    claims.finish()
