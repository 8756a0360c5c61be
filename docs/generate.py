"""Write the pages of the site that are made from the code: python docs/generate.py [--check].

Flags, presets, families, Megatron-LM's defaults, the engine's defects and the precision contract are described where
they are declared; figures are in `docs/reference/figures/*.yaml`. `--check` writes nothing, and fails where a page is
not current.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from importlib import import_module
from pathlib import Path

import yaml

from megatron_moe.config.command_line import entries
from megatron_moe.config.fields import all_fields
from megatron_moe.config.presets import PRESETS, PUBLISHED
from megatron_moe.config.schema import build
from megatron_moe.engine.defects import NEWEST, OLDEST, Defect, dotted, known_defects
from megatron_moe.hf.families import FAMILIES, REFUSED, family_of
from megatron_moe.hf.family import Family
from megatron_moe.precision.table import contract
from megatron_moe_tools import compat
from megatron_moe_tools.compat.megatron_settings import DEFAULTS

DOCS = Path(__file__).resolve().parent
RECIPES = DOCS.parent / "examples" / "recipes"
CONFIGS = DOCS.parent / "tests" / "hf" / "published_configs.json"
NOTE = "<!-- written by `python docs/generate.py` -->"
DEFECTS = DOCS / "internals" / "engine_defects.md"
README = DOCS.parent / "README.md"
DEFECTS_BEGIN = "<!-- engine defects: written by `python docs/generate.py` -->"
FAMILIES_BEGIN = "<!-- families: written by `python docs/generate.py` -->"
END = "<!-- end -->"


def pages() -> dict[Path, str]:
    """Return every generated page: its path and its text."""
    reference = DOCS / "reference"
    found = {reference / "flags.md": flags_page()}
    found[reference / "api" / "index.md"] = api_page()
    found[reference / "megatron_defaults.md"] = megatron_defaults_page()
    presets = published()
    for name, family in FAMILIES.items():
        found[reference / "families" / f"{name}.md"] = family_page(family, presets[name])
    found[reference / "families" / "index.md"] = families_page(presets)
    found[README] = readme(README.read_text(encoding="utf-8"))
    found[reference / "precision.md"] = precision_page()
    found[DEFECTS] = defects_page(DEFECTS.read_text(encoding="utf-8"))
    topics = sorted((reference / "figures").glob("*.yaml"))
    for topic in topics:
        found[topic.with_suffix(".md")] = figures_page(topic)
    found[reference / "figures" / "index.md"] = figures_index(topics)
    return {path: text.rstrip() + "\n" for path, text in found.items()}


def flags_page() -> str:
    """Return the page of flags, by group, with values, defaults and meaning."""
    every = entries(compat.parser())
    lines = [
        "# Flags",
        "",
        NOTE,
        "",
        "Every flag of `pretrain_moe.py`, and so each key of a `--config` file (without the dashes). Megatron-LM's",
        "other flags: `megatron-moe flags FLAG`, or `megatron-moe train --help FLAG`.",
    ]
    for group in dict.fromkeys(entry.group for entry in every):
        lines += ["", f"## {group}", "", "| flag | meaning |", "|---|---|"]
        for entry in every:
            if entry.group == group:
                cells = [f"`{entry.typed}`", entry.text]
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


API = {
    "megatron_moe_tools.api": ("Settings", "train", "RunResult", "load_model", "save_hf", "Model"),
    "megatron_moe.training.callback": ("Callback", "Step"),
    "megatron_moe.training.step": ("StepResult",),
    "megatron_moe.engine.adam": ("Adam",),
}
PARTS = {
    "megatron_moe.moe.router": ("TopKRouter",),
    "megatron_moe.moe.layer": ("MoELayer",),
    "megatron_moe.model.float16_module": ("Float16Module",),
    "megatron_moe.training.finalize_model_grads": ("finalize_model_grads",),
}
"""Module -> what the page of the Python interface describes from its docstrings."""


def api_page() -> str:
    """Return the page of the Python interface: tables that read anywhere, and what the site puts docstrings in for."""
    lines = ["# API", "", NOTE, "", "[Train from Python](../../guides/python.md) shows how to use it."]
    of_parts = "## Parts for a megatron-core program\n\nImport `megatron_moe` before `megatron.core`."
    for head, modules in (("## Programs", API), (of_parts, PARTS)):
        rows: list[tuple[str, ...]] = []
        directives = []
        for module, names in modules.items():
            for name in names:
                rows += api_rows(name, getattr(import_module(module), name))
                directives.append(f"::: {module}.{name}")
                if name == "StepResult":
                    directives[-1] += "\n    options:\n      inherited_members: true"
        lines += ["", head, "", table(("name", "what it is"), rows), "", "\n\n".join(directives)]
    return "\n".join(lines)


def api_rows(name: str, entry: object) -> list[tuple[str, str]]:
    """Return the row of a class or function: its arguments or public names, and how its docstring begins."""
    begin = re.split(r"[.,;:(]", inspect.getdoc(entry) or "", maxsplit=1)[0]
    if inspect.isfunction(entry):
        name = f"{name}({', '.join(inspect.signature(entry).parameters)})"
    return [(f"`{name}`", " ".join(begin.split()))]


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def size(parameters: int) -> str:
    """Return a number of parameters as people say it."""
    return f"{parameters / 1e9:.1f}B"


def published() -> dict[str, list[str]]:
    """Return the presets of each family, by what their authors' config.json says; a smaller model first."""
    configs = json.loads(CONFIGS.read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for name in sorted(PUBLISHED, key=lambda name: (build(PRESETS[name]).derived.parameter_count(0), name)):
        found[family_of(configs[name], name).name].append(name)
    return found


SIZES = ("preset", "parameters", "active", "layers × width", "experts", "layout", "memory", "rates")


def preset_row(name: str) -> tuple[str, ...]:
    """Return what the page of a family says about a preset: the model, and how its recipe trains it."""
    run = build(PRESETS[name])
    moe, derived = run.moe, run.derived
    vocabulary = derived.padded_vocab_size(run.model.vocab_size or 0)
    active = experts = ""
    if moe.num_experts is not None:
        active, experts = size(derived.active_parameter_count(vocabulary)), f"{moe.moe_router_topk}/{moe.num_experts}"
    recipe = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    said = dict(re.findall(r"^# (layout|memory|rates): (.*)$", recipe, re.MULTILINE))
    return (
        name,
        size(derived.parameter_count(vocabulary)),
        active,
        f"{run.model.num_layers} × {run.model.hidden_size}",
        experts,
        said["layout"],
        said["memory"].partition(" of ")[0],
        said["rates"],
    )


def family_page(family: Family, presets: list[str]) -> str:
    """Return the page of a family: what is read, what is refused, and a row for each published size."""
    kinds = ", ".join(f"`{kind}`" for kind in family.model_types)
    rows = [preset_row(name) for name in presets]
    return f"""# {family.name}

{NOTE}

{family.models}: `{family.architecture}`, `model_type` {kinds}.

- Read: {family.reads}.
- Refused: {family.refuses}.

{table(SIZES, rows) if rows else "No size has a preset."}
"""


def families_page(presets: dict[str, list[str]]) -> str:
    """Return the list of the families with their presets, how one is used, and what is refused."""
    rows = [(f"[{name}]({name}.md)", ", ".join(members)) for name, members in presets.items()]
    reasons: dict[str, list[str]] = {}
    for kind, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(f"`{kind}`")
    refused = [(", ".join(kinds), reason) for reason, kinds in reasons.items()]
    return f"""# Families and presets

{NOTE}

Models of these families come from Hugging Face and go back
([continue a model](../../start/continue_a_model.md), [conversion](../../guides/conversion.md)). A preset is a published
size (`--preset NAME`). Its recipe in `examples/recipes/` adds a layout that fits on 80 GB devices, batch sizes and
learning rates. A family's page has both: parameters without multi-token prediction, those that a token meets (active),
experts that it chooses, memory of the largest rank by `megatron-moe plan`, and where the rates are from.

{table(("family", "presets"), rows)}

Plan a recipe, and check it with your data and tokenizer in place of the stubs:

<!-- not run: it needs your data -->
```bash
megatron-moe plan --config examples/recipes/qwen3-30b-a3b.yaml --world-size 32
megatron-moe train --nnodes 4 --nproc-per-node 8 --config examples/recipes/qwen3-30b-a3b.yaml \\
  --tokenizer-model models/mine --train-data-path data/a --valid-data-path data/b --dry-run
```

## Refused

Any other `model_type` is refused, these with a reason:

{table(("`model_type`", "because"), refused)}
"""


def between(text: str, begin: str, shown: str) -> str:
    """Return a page with `shown` between the mark `begin` and the next end mark; the rest is written by hand."""
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(END)
    assert found and ended, f"no {begin} with an {END} behind it"
    return f"{before}{begin}\n{shown}\n{END}{after}"


def readme(text: str) -> str:
    """Return README with its table of the families and of the models that each has."""
    rows = [(f"[{name}](docs/reference/families/{name}.md)", family.models) for name, family in FAMILIES.items()]
    return between(text, FAMILIES_BEGIN, table(("family", "models"), rows))


def megatron_defaults_page() -> str:
    """Return the defaults of Megatron-LM that are other ones here, and what `--defaults megatron` does."""
    flags = {name: field.flag for name, field in all_fields().items()}
    rows = []
    for default in DEFAULTS:
        effect = f"{default.answer}: {default.reason}" if default.reason else default.answer
        rows.append((f"`{flags[default.field]}`", default.theirs, default.ours, default.where, effect))
    return f"""# Defaults that differ from Megatron-LM's

{NOTE}

`--defaults megatron` uses Megatron-LM's defaults ([from Megatron-LM](../start/from_megatron.md#defaults)): one that is
`taken` is used, `kept` stays as it is here, and `to give` has no such default, so the run asks for the flag.

{table(("flag", "Megatron-LM", "here", "matters with", "`--defaults megatron`"), rows)}
"""


def precision_page() -> str:
    """Return the precision contract of a bf16 run."""
    columns = ("name", "stored", "computed", "accumulated", "reduced", "saved", "note")
    rows = []
    for row in contract(build({**PRESETS["deepseek-v3"], "bf16": True})):
        rows.append(tuple(getattr(row, column) for column in columns))
    return f"""# The precision table

{NOTE}

The dtype of every kind of tensor in a bf16 run, checked while it trains ([precision](../guides/precision.md)).
`--print-precision` prints it for any flags.

{table(("tensor", *columns[1:]), rows)}
"""


def figures_page(topic: Path) -> str:
    """Return the measurements of a topic, each with the command that repeats it."""
    facts = yaml.safe_load(topic.read_text(encoding="utf-8"))
    rows, above = [], ("", "")
    for row in facts["rows"]:
        what = f"{row['what']} ({row['note']})" if "note" in row else row["what"]
        conditions = (row["where"], f"`{row['command']}`")
        shown = tuple("" if cell == before else cell for cell, before in zip(conditions, above))
        rows.append((what, str(row["value"]), *shown))
        above = conditions
    return f"""# {facts["title"]}

{NOTE}

{facts["about"]} An empty cell is as above.

{table(("what", "measured", "on", "repeat it with"), rows)}
"""


def figures_index(topics: list[Path]) -> str:
    """Return the list of the pages of measurements."""
    lines = []
    for topic in topics:
        facts = yaml.safe_load(topic.read_text(encoding="utf-8"))
        lines.append(f"- [{facts['title']}]({topic.stem}.md): {len(facts['rows'])} figures")
    listed = "\n".join(lines)
    return f"""# Figures

{NOTE}

What was measured, on which machine, and the command that repeats it.

{listed}
"""


def defects_page(text: str) -> str:
    """Return the page of the engine's defects with the present table between its marks; the rest is written by hand."""
    columns = ("id", "what goes wrong", "in", "source", "here", "test")
    rows = []
    for defect in known_defects():
        here = defect.how if defect.treatment == "overridden" else f"{defect.treatment}: {defect.how}"
        shown = f"`{defect.tests[0]}`" if defect.tests else f"none: {defect.no_test}"
        rows.append((defect.id, defect.title, releases(defect), defect.source, here, shown))
    return between(text, DEFECTS_BEGIN, table(columns, rows))


def releases(defect: Defect) -> str:
    """Return which releases have a defect, in the words that the page explains."""
    if defect.fixed_in == NEWEST:
        return f"not {dotted(NEWEST)}"
    if defect.fixed_in is not None:
        return f"before {dotted(defect.fixed_in)}"
    return "all" if defect.since == OLDEST else f"from {dotted(defect.since)}"


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them; return 0, 1 where one is not current, 2 for a wrong argument."""
    if arguments not in ([], ["--check"]):
        print("usage: python docs/generate.py [--check]", file=sys.stderr)
        return 2
    stale = []
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(str(path.relative_to(DOCS.parent)))
            if not arguments:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    if arguments and stale:
        print(f"not current: {', '.join(stale)}; run: python docs/generate.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
