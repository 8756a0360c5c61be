"""A setting is declared once and read where it is used: no second table carries it from the flag to its reader."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import megatron_moe
from megatron_moe.config.model_flags import MoEConfig
from megatron_moe.config.schema import sections

PACKAGE = Path(megatron_moe.__file__).parent
# What declares a setting, checks it or sets it, and does not act on it.
FLAGS = ("config/model_flags.py", "config/run_flags.py")
DECLARES = (
    *FLAGS,
    "config/fields.py",
    "config/cli.py",
    "config/presets",
    "config/rules/",
    "config/megatron_defaults.py",
)

# Fields that nothing reads by name, each with the reason.
NOT_READ = {
    "account_for_embedding_in_pipeline_split": "the command line writes the split as --pipeline-model-parallel-layout",
    "account_for_loss_in_pipeline_split": "the command line writes the split as --pipeline-model-parallel-layout",
    "moe_enable_deepep": "Megatron-LM's switch for what the flex dispatcher does: the rules check that it is chosen",
    "pretrained_checkpoint": "the command line makes it --load and --finetune where --load has no step yet",
    "use_rope_scaling": "a rule refuses it, but for latent attention, which does not read it",
    "fp8_param_gather": "the command line leaves it out with a note, and a rule refuses it",
    "use_checkpoint_args": "the command line is read again with the checkpoint's settings",
    "valid_data_path": "read by its name, with those of the other splits (data/sources.py)",
}

# ---- How many files of the library name a field of MoEConfig.

SWITCH, SIZE = 3, 6
"""Files for what the MoE layer alone reads (the schema, moe/options.py, the rules), and for what others need too."""

SIZES = {
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_load_balancing_type",
    "moe_router_enable_expert_bias",
    "moe_expert_capacity_factor",
}

# Files that are left out of the count, each with the reason.
LEFT_OUT = {
    "apps/": "programs that use the library",
    "config/megatron_defaults.py": "data: values of flags, and the runs that they matter to",
    "config/presets.py": "data: values of flags",
    "config/presets_published.py": "data: values of flags",
    "hf/": "readers and writers of Hugging Face's config.json name what they translate",
    "megatron_lm/": "readers and writers of Megatron-LM's arguments name what they translate",
    "platform/defects.py": "which defects of the engine a run meets: it reads the flags that their table names",
}

# Fields that more files name, each with the number and the reason.
MORE = {
    "num_experts": (7, "None says that a model is dense, which the printed tables and notices ask too"),
    "moe_router_pre_softmax": (4, "the default of the normalisation follows from it (config/derived.py)"),
    "moe_router_norm_topk_prob": (4, "its default follows from other settings (config/derived.py)"),
    "moe_router_dtype": (5, "the table of dtypes and its title show it; the engine is given one, or it warns"),
    "moe_expert_backend": (5, "config/registry.py names it in its messages; the start of a run says what computes FP8"),
    "moe_shared_expert_gate": (
        6,
        "a weight: counted, one that can be kept fp32, and one whose gradient is not rounded",
    ),
    "moe_global_aux_loss_counts": (4, "the start of a run says what it costs"),
    "moe_input_jitter_eps": (5, "it draws random numbers: a run says so, also where a resume draws others"),
    "moe_token_dispatcher_type": (5, "config/registry.py names it in its messages; the engine frees memory by it"),
    "moe_flex_dispatcher_backend": (4, "the engine's schedule of two micro-batches frees memory by it"),
    "overlap_moe_expert_parallel_comm": (5, "the engine's schedule; a run and a replay of a step say or do without it"),
    "delay_wgrad_compute": (4, "the engine's nodes take it too (model/overlap.py)"),
    "moe_shared_expert_overlap": (4, "the start of a run says that it has no effect on a CPU"),
    "moe_router_force_load_balancing": (4, "the start of a run warns of it"),
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def library() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), path


def named(path: Path) -> set[str]:
    """Attributes, keywords, declarations and string literals of a file; of `num_experts`, which the MoE room's own
    classes have too, the reads of a run's section alone."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            if node.attr != "num_experts" or ast.unparse(node.value).split(".")[-1] == "moe":
                found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg not in (None, "num_experts"):
            found.add(str(node.arg))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def files_that_name(field: str) -> list[str]:
    """The rules count as one: in which of their files a setting's limits stand is a matter of their topics."""
    files = {
        "config/rules/" if name.startswith("config/rules/") else name
        for name, path in library()
        if not name.startswith(tuple(LEFT_OUT)) and field in named(path)
    }
    return sorted(files)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(MoEConfig)])
def test_few_files_name_a_moe_setting(field: str) -> None:
    most, _ = MORE.get(field, (SIZE if field in SIZES else SWITCH, ""))
    files = files_that_name(field)
    assert {"config/model_flags.py"} < set(files) and len(files) <= most, files
    assert field not in MORE or len(files) == most, "the exception is no longer needed"


def test_every_exception_has_a_reason_and_is_needed() -> None:
    names = [name for name, _ in library()]
    assert all(reason for reason in (*LEFT_OUT.values(), *NOT_READ.values(), *(reason for _, reason in MORE.values())))
    assert all(any(name.startswith(prefix) for name in names) for prefix in LEFT_OUT)
    assert all(number > (SIZE if field in SIZES else SWITCH) for field, (number, _) in MORE.items())


def test_every_setting_is_read_by_the_code_that_it_is_for() -> None:
    """A flag that is declared, checked and read by nobody would change nothing."""
    read = {
        node.attr
        for name, path in library()
        if not name.startswith(DECLARES)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) != "run"
    }
    fields = {field.name for section in sections().values() for field in dataclasses.fields(section)}
    assert fields - read == set(NOT_READ)


def test_only_the_options_read_the_engines_configuration_where_none_are_given() -> None:
    calls = {
        name: sum(
            isinstance(node, ast.Attribute) and node.attr == "from_engine_config" for node in ast.walk(tree(path))
        )
        for name, path in library()
    }
    assert {name: number for name, number in calls.items() if number} == {"moe/layer.py": 1, "moe/router.py": 1}


def test_a_score_function_is_named_where_it_is_declared_and_where_it_is_computed() -> None:
    """Another one takes a name in config/registry.py and a function in moe/routing.py, its test and its docs."""
    files = [
        name
        for name, path in library()
        if not name.startswith(tuple(LEFT_OUT))
        and any(isinstance(node, ast.Constant) and node.value == "sigmoid" for node in ast.walk(tree(path)))
    ]
    # Sinkhorn's weights, which are Megatron-LM's, are options of their own.
    assert files == ["config/registry.py", "moe/options.py", "moe/routing.py"]
