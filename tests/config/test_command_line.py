"""A YAML file sets fields by their names, flat or under their section, with the types of the schema."""

import pytest

from megatron_moe.config import cli
from megatron_moe_tools import compat
from tests.config.refused import refused


@pytest.fixture
def parse(tmp_path):
    def parsed(text: str):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return compat.parse(["--config", str(path)])

    return parsed


def test_keys_may_be_flat_grouped_or_spelt_like_the_flag(parse):
    run = parse("hidden_size: 64\nnum-layers: 2\nmoe:\n  num_experts: 8\n  moe-router-topk: 4\noptimizer: adam\n")
    assert (run.model.hidden_size, run.model.num_layers, run.moe.num_experts, run.moe.moe_router_topk) == (64, 2, 8, 4)


def test_a_section_with_the_name_of_a_field_is_told_apart_by_its_mapping(parse):
    assert parse("optimizer:\n  optimizer: adam\n  lr: 0.5\n").optimizer.lr == 0.5


def test_values_take_the_types_of_the_schema(parse):
    run = parse("lr: 1e-3\nmin_lr: 0\nmoe_layer_freq: 2\nmoe_aux_loss_coeff: [0.1, 1]\ndata_path: corpus\nbf16: true\n")
    assert run.optimizer.lr == 1e-3 and isinstance(run.optimizer.min_lr, float)
    assert run.moe.moe_layer_freq == 2 and run.moe.moe_aux_loss_coeff == (0.1, 1.0)
    assert run.data.data_path == ("corpus",) and run.precision.bf16 is True


def test_an_empty_file_changes_nothing(parse):
    assert parse("# nothing yet\n") == cli.parse([])


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("moe:\n  num_expert: 4", ["moe.num_expert", "unknown key", "did you mean num_experts?"]),
        ("modle:\n  num_layers: 4", ["modle", "unknown key", "did you mean model?"]),
        ("moe:\n  num_layers: 4", ["moe.num_layers", "belongs to section model"]),
        ("num_layers: four", ["num_layers", "'four'", "whole number"]),
        ("num_layers: 4.5", ["num_layers", "4.5", "whole number"]),
        ("num_layers: true", ["num_layers", "True", "whole number"]),
        ("num_layers: null", ["num_layers", "null", "whole number"]),
        ("num_layers: [4]", ["num_layers", "a list", "whole number"]),
        ("bf16: 1", ["bf16", "1", "true or false"]),
        ("lr: quick", ["lr", "'quick'", "a number"]),
        ("lr: true", ["lr", "True", "a number"]),
        ("save: 5", ["save", "5", "quotes"]),
        ("moe_router_dtype: bf16", ["moe_router_dtype", "bf16", "fp32, fp64"]),
        ("data_path: []", ["data_path", "empty list"]),
        ("lr: 1\nnum_layers: 4\nnum_layers: 5", ["num_layers", "twice", "line 3"]),
        ("num_layers: 4\nmodel:\n  num_layers: 5", ["num_layers", "twice"]),
        ("num_layers: 4\nnum-layers: 5", ["num-layers", "twice"]),
        ("preset: [tiny]", ["preset", "one name"]),
        ("epochs: 3", ["epochs", "use --train-iters"]),
        ("moe_grouped_gemm: true", ["--moe-expert-backend grouped_mm"]),
        ("- num_layers", ["no mapping"]),
        ("a: [", ["not YAML"]),
        ("a: !!python/object/apply:os.system [true]", ["not YAML"]),
    ],
)
def test_a_wrong_file_is_refused_with_file_and_key(parse, text, fragments):
    refused(lambda: parse(text), "run.yaml", *fragments)
