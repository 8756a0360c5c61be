"""Write the pages of the site that are made from the code: python docs/generate.py [--check].

Flags, presets, families, Megatron-LM's defaults, the engine's defects and the precision contract are described where
they are declared; figures are in `docs/reference/figures/*.yaml`. `--check` writes nothing, and fails where a page is
not current.
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

import yaml

from megatron_moe.config.command_line import entries
from megatron_moe.config.fields import all_fields
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build
from megatron_moe.engine.defects import NEWEST, OLDEST, Defect, dotted, known_defects
from megatron_moe.hf.config import family_of_run
from megatron_moe.hf.families import FAMILIES, REFUSED
from megatron_moe.hf.family import Family
from megatron_moe.precision.table import contract
from megatron_moe_tools import compat
from megatron_moe_tools.compat.megatron_settings import DEFAULTS

DOCS = Path(__file__).resolve().parent
RECIPES = DOCS.parent / "examples" / "recipes"
NOTE = "<!-- written by `python docs/generate.py` -->"
DEFECTS = DOCS / "internals" / "engine_defects.md"
DEFECTS_BEGIN, DEFECTS_END = "<!-- engine defects: written by `python docs/generate.py` -->", "<!-- end -->"


def pages() -> dict[Path, str]:
    """Return every generated page: its path and its text."""
    reference = DOCS / "reference"
    found = {reference / "flags.md": flags_page()}
    found[reference / "api" / "index.md"] = api_page()
    found[reference / "megatron_defaults.md"] = megatron_defaults_page()
    published = sorted(name for name in PRESETS if (RECIPES / f"{name}.yaml").exists())
    for name in published:
        found[reference / "presets" / f"{name}.md"] = preset_page(name)
    found[reference / "presets" / "index.md"] = presets_page(published)
    for family in FAMILIES.values():
        found[reference / "families" / f"{family.name}.md"] = family_page(family, published)
    found[reference / "families" / "index.md"] = families_page(published)
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
    return f"{parameters / 1e9:.1f} B"


def sizes(run: Run) -> tuple[str, str]:
    """Return all parameters of a published model, and those that a token meets."""
    vocabulary = run.derived.padded_vocab_size(run.model.vocab_size or 0)
    return size(run.derived.parameter_count(vocabulary)), size(run.derived.active_parameter_count(vocabulary))


def family_name(run: Run) -> str:
    """Return the family of a preset."""
    return family_of_run(run).name


def preset_page(name: str) -> str:
    """Return the page of a preset: the model, and how its recipe trains it."""
    run, path = build(PRESETS[name]), RECIPES / f"{name}.yaml"
    total, active = sizes(run)
    moe = run.moe
    attention = f"{run.model.num_attention_heads} heads, {run.derived.num_query_groups} groups of keys and values"
    if run.model.multi_latent_attention:
        attention = f"{run.model.num_attention_heads} heads of latent attention (rank {run.model.kv_lora_rank})"
    experts = f"{moe.num_experts} of width {run.derived.moe_ffn_hidden_size}, {moe.moe_router_topk} for each token"
    if moe.moe_shared_expert_intermediate_size is not None:
        experts += f", shared experts of width {moe.moe_shared_expert_intermediate_size}"
    router = moe.moe_router_score_function
    if moe.moe_router_enable_expert_bias:
        router += " with expert bias"
    if moe.moe_router_num_groups:
        router += f", {moe.moe_router_group_topk} of {moe.moe_router_num_groups} groups"
    dense = run.derived.moe_layer_pattern.count(0)
    layers = f"{run.model.num_layers}" + (f", the first {dense} dense" if dense else "")
    rows = [
        ("parameters", f"{total}, {active} for each token"),
        ("layers, width", f"{layers}; {run.model.hidden_size}"),
        ("attention", attention),
        ("experts", experts),
        ("router", router),
        ("vocabulary", f"{run.model.vocab_size:,}"),
        ("positions", f"{run.derived.max_position_embeddings:,}"),
    ]
    comment = [line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# ")]
    facts = dict(line.split(": ", 1) for line in comment if ": " in line)
    rows += [(key, facts[key]) for key in ("layout", "memory", "rates")]
    recipe, family = path.relative_to(DOCS.parent), family_name(run)
    return f"""# {name}

{NOTE}

Family [{family}](../families/{family}.md); recipe `{recipe}`.

{table(("", ""), rows)}
"""


def presets_page(published: list[str]) -> str:
    """Return the list of the presets that have a recipe."""
    rows = []
    for name in published:
        run = build(PRESETS[name])
        rows.append((f"[{name}]({name}.md)", *sizes(run), family_name(run)))
    return f"""# Presets and recipes

{NOTE}

A preset is a model (`--preset NAME`); its recipe in `examples/recipes/` adds a layout that fits on 80 GB devices,
batch sizes and learning rates. Parameters are counted without multi-token prediction. Plan one, check it with your
data and tokenizer in place of the stubs:

<!-- not run: it needs your data -->
```bash
megatron-moe plan --config examples/recipes/qwen3-30b-a3b.yaml --world-size 32
megatron-moe train --nnodes 4 --nproc-per-node 8 --config examples/recipes/qwen3-30b-a3b.yaml \\
  --tokenizer-model models/mine --train-data-path data/a --valid-data-path data/b --dry-run
```

{table(("preset", "parameters", "for each token", "family"), rows)}
"""


def family_page(family: Family, published: list[str]) -> str:
    """Return the page of a family: what is read, and what is refused."""
    members = [name for name in published if family_name(build(PRESETS[name])) == family.name]
    presets = [f"[{name}](../presets/{name}.md)" for name in members]
    rows = [
        ("`model_type`", ", ".join(f"`{kind}`" for kind in family.model_types)),
        ("models", family.models),
        *([("presets", ", ".join(presets))] if presets else []),
        ("read", family.reads),
        ("refused", family.refuses),
    ]
    return f"""# {family.name}

{NOTE}

{table(("", ""), rows)}
"""


def families_page(published: list[str]) -> str:
    """Return the list of the families, and of what is refused."""
    rows = [(f"[{family.name}]({family.name}.md)", f"`{family.architecture}`") for family in FAMILIES.values()]
    reasons: dict[str, list[str]] = {}
    for kind, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(f"`{kind}`")
    refused = [(", ".join(kinds), reason) for reason, kinds in reasons.items()]
    return f"""# Families of models at Hugging Face

{NOTE}

{table(("family", "class"), rows)}

How: [continue a model](../../start/continue_a_model.md), [conversion](../../guides/conversion.md).

Other values of `model_type` are refused, these with a reason:

{table(("`model_type`", "because"), refused)}
"""


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
    rows = []
    for row in facts["rows"]:
        what = f"{row['what']} ({row['note']})" if "note" in row else row["what"]
        rows.append((what, str(row["value"]), row["where"], f"`{row['command']}`"))
    return f"""# {facts["title"]}

{NOTE}

{facts["about"]}

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
    before, _, rest = text.partition(DEFECTS_BEGIN)
    _, _, after = rest.partition(DEFECTS_END)
    columns = ("id", "what goes wrong", "in", "source", "here", "test")
    rows = [columns, ("---",) * len(columns)]
    for defect in known_defects():
        here = defect.how if defect.treatment == "overridden" else f"{defect.treatment}: {defect.how}"
        shown = f"`{defect.tests[0]}`" if defect.tests else f"none: {defect.no_test}"
        rows.append((defect.id, defect.title, releases(defect), defect.source, here, shown))
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    return f"{before}{DEFECTS_BEGIN}\n{table}\n{DEFECTS_END}{after}"


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
