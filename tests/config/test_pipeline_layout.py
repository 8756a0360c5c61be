"""A layout by letters is read as the engine reads it, and the engine builds the layers that a stage is said to have."""

from unittest import mock

import pytest
from megatron.core import parallel_state
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.pipeline_layout import LETTERS, Stage, spelled_out
from megatron_moe.config.schema import Run, replace
from megatron_moe.model.engine_config import transformer_config

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "layout", ["Et*3|(tt|)*29,m|L", "Et|(tt|)*30mL", "Ettt|(t*2|)*3,t,m|L", "E|t*3|(t|)*5L", "Ett||tt|L", "E,t|*2ttL"]
)
def test_letters_are_read_as_the_engine_reads_them(layout):
    engine = PipelineParallelLayerLayout.parse_str_to_list(layout)
    assert [[LETTERS[letter] for letter in stage] for stage in spelled_out(layout)] == [
        [kind.name for kind in stage] for stage in engine
    ]


@pytest.mark.parametrize(
    "layout", ["Ettx|L", "E((t|)*2)*2L", "Et*|L", "E(t|L", "Et3|L", "Et*3*2L", "*2EtL", "()*2", "e|t"]
)
def test_what_is_no_layout_is_refused(layout):
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-layout"):
        spelled_out(layout)


def test_spaces_between_letters_mean_nothing():
    assert spelled_out("E tt | tL") == ["Ett", "tL"]


PP4 = {"pipeline_model_parallel_size": 4}
SPLITS = {
    "even": {**PP4},
    "virtual": {**PP4, "num_layers_per_virtual_pipeline_stage": 1},
    "virtual by number": {**PP4, "num_virtual_stages_per_pipeline_rank": 2},
    "last": {**PP4, "decoder_last_pipeline_num_layers": 2},
    "first and last": {**PP4, "decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3},
    "uneven": {**PP4, "pipeline_model_parallel_layout": "E|t*5|tt|tL"},
    "loss alone": {**PP4, "pipeline_model_parallel_layout": "Et|(t|)*5,tt|L"},
    "predictions alone": {**PP4, "pipeline_model_parallel_layout": "Et|(tt|)*3t||m|L", "mtp_num_layers": 1},
}


@pytest.mark.parametrize("split", SPLITS)
def test_the_engine_builds_the_layers_that_a_stage_is_said_to_have(split):
    run = replace(Run(), num_layers=8, **SPLITS[split])
    config, virtual = transformer_config(run), run.derived.virtual_pipeline_size
    assert config.virtual_pipeline_model_parallel_size == virtual
    seen = []
    for rank in range(4):
        with (
            mock.patch.object(parallel_state, "get_pipeline_model_parallel_rank", return_value=rank),
            mock.patch.object(parallel_state, "get_virtual_pipeline_model_parallel_world_size", return_value=virtual),
        ):
            for chunk, stage in enumerate(run.derived.chunks_of_pipeline_rank(rank)):
                number = None if virtual is None else chunk
                first = get_transformer_layer_offset(config, number, rank)
                assert range(first, first + get_num_layers_to_build(config, number, rank)) == stage.layers
                seen += stage.layers
    assert sorted(seen) == list(range(8))


def test_a_rank_has_every_pp_th_stage():
    run = replace(Run(), num_layers=5, **PP4, pipeline_model_parallel_layout="Et|tt|t||t||m|L", mtp_num_layers=1)
    assert run.derived.virtual_pipeline_size == 2
    assert run.derived.pipeline_layer_counts == (2, 2, 1, 0)
    first, last = Stage(True, range(0, 1), 0, False, 0), Stage(False, range(4, 5), 0, False, 1)
    assert run.derived.chunks_of_pipeline_rank(0) == (first, last)
    assert [stage.letters for stage in run.derived.chunks_of_pipeline_rank(2)] == ["t", "m"]
    assert run.derived.predictions_pipeline_rank == 2
    assert [stage.receives for stage in run.derived.pipeline_stages] == [0, 1, 1, 1, 1, 1, 1, 2]
    together = replace(run, pipeline_model_parallel_layout="Et|tt|t||t|||mL")
    assert together.derived.predictions_pipeline_rank is None
