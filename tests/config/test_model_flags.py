"""Each setting is read by the code that it is for."""

import ast
import dataclasses

from megatron_moe.config.schema import sections
from tests.helpers.sources import name_of, nodes, sources

# What declares a setting, checks it or sets it, and does not act on it.
DECLARES = (
    "config/model_flags.py",
    "config/run_flags.py",
    "config/fields.py",
    "config/cli.py",
    "config/presets",
    "config/rules/",
)

# Fields that nothing reads by name, each with the reason.
NOT_READ = {
    "account_for_embedding_in_pipeline_split": "the command line writes the split as --pipeline-model-parallel-layout",
    "account_for_loss_in_pipeline_split": "the command line writes the split as --pipeline-model-parallel-layout",
    "moe_enable_deepep": "Megatron-LM's switch for what the flex dispatcher does: the rules check that it is chosen",
    "override_opt_param_scheduler": "what is done without it: a rule refuses it beside its opposite",
    "pretrained_checkpoint": "the command line makes it --load and --finetune where --load has no step yet",
    "fp8_param_gather": "the command line leaves it out with a note, and a rule refuses it",
}


def test_every_setting_is_read_by_the_code_that_it_is_for():
    """A flag that is declared, checked and read by nobody would change nothing."""
    read = set()
    for path in sources("megatron_moe"):
        if name_of(path).startswith(DECLARES):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                if getattr(node.value, "id", "") != "run":
                    read.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                read.add(node.slice.value)  # of the flat settings
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                read.add(getattr(node.args[1], "value", None))
    fields = {field.name for section in sections().values() for field in dataclasses.fields(section)}
    assert fields - read == set(NOT_READ)
