"""config.json: read in both spellings, written such that transformers and we read the same model from it."""

import copy
import importlib
import json
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import save_file

from megatron_moe.checkpoint.plan import architecture_keys
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.presets import PRESETS, PUBLISHED
from megatron_moe.config.rotary import amplitude, change
from megatron_moe.config.rules import check_model
from megatron_moe.config.schema import Run, build, flatten, replace
from megatron_moe.hf import config as hf_config
from megatron_moe.hf.config import family_of_run, filled_in
from megatron_moe.hf.families import FAMILIES
from megatron_moe.hf.mapping import mapping, require_tensors
from megatron_moe.model import mla
from megatron_moe.model.rotary import Rotation
from megatron_moe_tools import compat
from tests.config.refused import refused
from tests.helpers import tiny_models
from tests.helpers.plain_steps import write_step
from tests.helpers.rows import rows

SAVED = {}


def saved(case: str) -> dict:
    """config.json of a case, as transformers writes it."""
    if case not in SAVED:
        config = tiny_models.config(case)
        config.architectures = [tiny_models.class_of(case, "ForCausalLM").__name__]
        SAVED[case] = json.loads(config.to_json_string())
    return copy.deepcopy(SAVED[case])


def read(config: dict, prediction: bool = False) -> hf_config.FolderSettings:
    return hf_config.settings(config, has_prediction_layers=prediction, where="--load-hf folder")


def loaded(config: dict) -> torch.nn.Module:
    """What transformers builds of a config.json, without memory for its weights."""
    fields = dict(config)
    described = transformers.AutoConfig.for_model(fields.pop("model_type"), **copy.deepcopy(fields))
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(described)


@pytest.mark.parametrize("case", tiny_models.CASES)
def test_both_spellings_say_the_same_without_a_note(case):
    v5 = read(saved(case))
    hub = read(tiny_models.hub_spelling(saved(case)))
    assert v5.flat == hub.flat
    assert v5.notes == hub.notes and all("index_topk" in note for note in v5.notes)
    assert v5.family is hub.family
    # one that was trained here may be another family's too, whose format says the same
    run = build(v5.flat)
    assert hf_config.differences(run, read(hf_config.config_of(run, family_of_run(run), "bfloat16")).flat) == []


@pytest.mark.parametrize("case", [case for case in tiny_models.CASES if "text_config" not in saved(case)])
def test_another_number_of_positions_leaves_the_model_as_it_was(case):
    before = saved(case)
    window = before["sliding_window"] = before["max_position_embeddings"]
    windowed = "sliding_attention" in (before.get("layer_types") or ())
    for config in (before, tiny_models.hub_spelling(before)):
        changed, notes = hf_config.with_positions(config, 8192)
        assert read(changed).flat == {**read(before).flat, "max_position_embeddings": 8192}
        assert hf_config.with_positions(changed, 8192) == (changed, []) and config["max_position_embeddings"] != 8192
        about = [(False, False), *[(False, True)] * (not windowed)]
        about += [(True, False)] * (read(before).flat.get("rope_type") == "yarn")
        assert [("yarn" in note, "sliding_window" in note) for note in notes] == about
        theirs, as_it_was = loaded(changed).config, loaded(config).config
        assert theirs.max_position_embeddings == 8192
        assert (getattr(theirs, "sliding_window", None) or 0) == window * windowed
        assert theirs.rope_parameters == as_it_was.rope_parameters


WRITTEN = [case for case in tiny_models.CASES if read(saved(case)).family.without is None]


@pytest.mark.parametrize("case", WRITTEN)
def test_a_written_configuration_is_read_as_the_run_and_by_transformers(case):
    run = build(read(saved(case)).flat)
    written = hf_config.config_of(run, read(saved(case)).family, "bfloat16")
    assert read(written).flat == read(saved(case)).flat
    assert hf_config.differences(run, read(written).flat) == []
    model = loaded(written)
    assert type(model).__name__ == written["architectures"][0]
    theirs = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert run.derived.parameter_count(tiny_models.VOCABULARY) == theirs
    # Everything that the case had set is there again, by transformers' own names.
    for key, value in tiny_models.CASES[case][1].items():
        found = getattr(model.config, key)
        if key == "rope_parameters" and "alpha" in value:  # written as the base that it makes
            value, found = run.model.rotary_base, found["rope_theta"]
        elif key == "rope_parameters":
            found = {name: found[name] for name in value}
        assert found == value or key in ("decoder_sparse_step", "mlp_only_layers"), key
    again = json.loads(model.config.to_json_string())
    assert read(again).flat == read(saved(case)).flat, "saved once more by transformers, it is another model"


def test_null_and_a_list_of_layers_mean_what_they_say():
    case = {**saved("deepseek-v3"), "n_group": None, "n_shared_experts": None, "moe_layer_freq": [0, 1, 1, 1]}
    flat, usual = read(case).flat, read(saved("deepseek-v3")).flat
    assert flat["moe_router_num_groups"] is flat["moe_shared_expert_intermediate_size"] is None
    assert flat["moe_layer_freq"] == usual["moe_layer_freq"] == "[0]+[1]*3"


def test_a_written_configuration_has_the_words_of_both():
    run = build(read(saved("qwen3-moe")).flat)
    written = hf_config.config_of(run, FAMILIES["qwen3-moe"], "bfloat16")
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert written["num_experts"] == written["num_local_experts"] == 8
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1e6
    run = build(read(saved("deepseek-v3")).flat)
    written = hf_config.config_of(run, FAMILIES["deepseek-v3"], "float32")
    assert written["rope_scaling"]["type"] == written["rope_parameters"]["rope_type"] == "yarn"
    assert written["rope_scaling"]["mscale_all_dim"] == written["rope_parameters"]["mscale_all_dim"] == 1.0


def test_a_mixtral_of_one_chosen_expert_is_a_run():
    check_model(build(read({**saved("mixtral"), "num_experts_per_tok": 1}).flat), 1)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_written_and_is_read_again(name):
    run = build({"vocab_size": 1000, **PRESETS[name]})
    family = family_of_run(run)
    assert hf_config.differences(run, read(hf_config.config_of(run, family, "bfloat16")).flat) == []


SOFTMAX = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True, "moe_router_norm_topk_prob": False}
SUMS = {"moe_router_group_score": "megatron", "num_experts": 16, "moe_router_topk": 4, "moe_router_group_topk": 1}
UNSAID = [
    ({"moe_layer_freq": "[1]+[0]*1+[1]*2"}, "deepseek-v3", "--moe-layer-freq"),
    ({"moe_shared_expert_intermediate_size": 40}, "deepseek-v3", "--moe-shared-expert-intermediate-size"),
    ({"moe_shared_expert_intermediate_size": None}, "deepseek-v3", "n_shared_experts"),
    ({"moe_router_enable_expert_bias": False}, "deepseek-v3", "--moe-router-enable-expert-bias"),
    # one format here has a bias on softmax scores, ERNIE's
    ({"moe_router_score_function": "softmax"}, "deepseek-v3", "--moe-router-score-function: softmax"),
    (SOFTMAX, "deepseek-v2", "--moe-router-enable-expert-bias: True"),
    ({"moe_router_group_score": "max"}, "deepseek-v3", "--moe-router-group-score"),
    # of K = 2 in 2 groups megatron-core adds up one expert each
    ({"moe_router_group_score": "megatron"}, "deepseek-v3", "--moe-router-group-score: its best expert in the run"),
    (SUMS, "deepseek-v3", "group-score: the sum of its best 4 in the run, the sum of its best two in config.json"),
    ({"add_bias_linear": True}, "deepseek-v3", "--add-bias-linear"),
    ({"moe_router_load_balancing_type": ("sinkhorn",)}, "deepseek-v3", "--moe-router-load-balancing-type: sinkhorn"),
    ({"moe_ffn_hidden_size": 40}, "deepseek-v3", "shared-expert-intermediate-size 32.*--moe-ffn-hidden-size 40"),
    ({}, "mixtral", "--multi-latent-attention"),
    ({"num_experts": None}, "deepseek-v3", "--num-experts"),
]


@pytest.mark.parametrize(("changes", "family", "flag"), UNSAID)
def test_a_model_that_a_format_cannot_say_is_not_written(changes, family, flag):
    run = replace(build({"vocab_size": 1000, **PRESETS["tiny"]}), **changes)
    with pytest.raises(ConfigError, match=flag):
        hf_config.config_of(run, FAMILIES[family], "bfloat16")


def test_megatrons_score_of_groups_is_written_where_it_is_the_gates():
    sizes = {"moe_router_group_score": "megatron", "num_experts": 16, "moe_router_topk": 4, "moe_router_group_topk": 2}
    v3 = replace(build({"vocab_size": 1000, **PRESETS["tiny"]}), **sizes)
    assert read(hf_config.config_of(v3, FAMILIES["deepseek-v3"], "bfloat16")).flat["moe_router_group_score"] == "top2"
    v2 = replace(build({"vocab_size": 1000, **PRESETS["deepseek-v2"]}), moe_router_group_score="megatron")
    with pytest.raises(ConfigError, match="--moe-router-group-score: the sum of its best two in the run, its best exp"):
        hf_config.config_of(v2, FAMILIES["deepseek-v2"], "bfloat16")
    v2 = replace(v2, moe_router_group_topk=v2.moe.moe_router_topk)
    assert read(hf_config.config_of(v2, FAMILIES["deepseek-v2"], "bfloat16")).flat["moe_router_group_score"] == "max"


# ---- yarn

YARN = {**tiny_models.YARN, "original_max_position_embeddings": 4096}
SCALES = [
    {"mscale": 0.707, "mscale_all_dim": 0.707},
    {"mscale": 1.0, "mscale_all_dim": 0.5},
    {},
    {"mscale": 0.707},
    {"mscale": 0.707, "mscale_all_dim": 0},
    {"mscale_all_dim": 0.8},
    {"mscale": 0, "mscale_all_dim": 0.8},
    {"attention_factor": 0.5},
    {"attention_factor": 1.25, "mscale": 0.3, "mscale_all_dim": 0.8, "truncate": False},
    {"factor": 1.0},
    {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"beta_fast": None, "beta_slow": None, "truncate": True},
    {"rope_theta": 50000.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0},
]


def rotation(run: Run) -> tuple[torch.Tensor, float, float]:
    """Frequencies, amplitude of cosine and sine, and scale of the softmax, of our latent attention."""
    rotation = Rotation.from_run(run)
    return rotation.frequencies(1), amplitude(run.model), mla.softmax_scale(run.model, rotation)


@pytest.mark.parametrize(
    ("case", "scales"), [("deepseek-v2-grouped", SCALES[0]), *(("deepseek-v3", scales) for scales in SCALES)], ids=str
)
def test_yarn_rotates_and_scales_as_in_transformers(case, scales):
    config = saved(case)
    config["rope_parameters"] = {key: value for key, value in {**YARN, **scales}.items() if value is not None}
    config["max_position_embeddings"] = 163840
    described = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    name, kind = tiny_models.CASES[case][0], config["model_type"]
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    theirs = getattr(modeling, f"{name}RotaryEmbedding")(described)
    with torch.device("meta"):
        attention = getattr(modeling, f"{name}Attention")(described, 0)
    run = build(read(config).flat)
    for spelled in (run, build(read(hf_config.config_of(run, FAMILIES[read(config).family.name], "float32")).flat)):
        frequencies, amplitude, softmax_scale = rotation(spelled)
        torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0.0)
        assert amplitude == pytest.approx(theirs.attention_scaling, rel=1e-12)
        assert softmax_scale == pytest.approx(attention.scaling, rel=1e-12)


def test_yarn_without_betas_has_those_of_its_paper():
    rope = {key: value for key, value in YARN.items() if not key.startswith("beta")}
    for betas in ({}, {"beta_fast": None, "beta_slow": 0}):
        flat = read({**saved("deepseek-v3"), "rope_parameters": {**rope, **betas}}).flat
        assert (flat["beta_fast"], flat["beta_slow"]) == (32.0, 1.0)


def test_one_scale_of_yarn_alone_is_told_since_implementations_differ():
    config = {**saved("deepseek-v3"), "max_position_embeddings": 163840}
    one, other = {"mscale": 0.7}, {"mscale_all_dim": 0.7}
    for scales, notes in (({}, 0), (one, 1), (other, 1), (one | other, 0)):
        told = read({**config, "rope_parameters": {**YARN, **scales}}).notes
        assert len(told) == notes and all("mscale_all_dim" in note for note in told)


# ---- multi-token prediction, quantisation, what is missing


@pytest.mark.parametrize("case", ["deepseek-v3", "glm4-moe", "glm4-moe-lite"])
def test_prediction_layers_are_read_where_their_tensors_are(case):
    promised = {**saved(case), "num_nextn_predict_layers": 2}
    assert read(promised, prediction=True).flat["mtp_num_layers"] == 2
    without = read(promised)
    assert without.flat["mtp_num_layers"] is None
    assert "WARNING" in without.notes[0] and "num_nextn_predict_layers 2" in without.notes[0]
    run = build(read(promised, prediction=True).flat)
    assert hf_config.config_of(run, family_of_run(run), "bfloat16")["num_nextn_predict_layers"] == 2


def test_ernies_layers_of_prediction_go_along_untrained():
    for promised in (False, True):
        described = read({**saved("ernie4-5-moe"), "num_nextn_predict_layers": 1}, prediction=promised)
        assert described.flat == read(saved("ernie4-5-moe")).flat
        assert ["not trained" in note for note in described.notes] == [True]
    table, block = mapping(build(described.flat), described.family.names), "model.mtp_block.0.mlp.gate.weight"
    copies, dropped = require_tensors(table, {**table.hf_shapes, block: (8, 64)}, "folder")
    assert (copies, table.left_out(dropped)["carried"]) == ([], [block])


def test_kimi_k2_in_blocks_of_fp8_is_read_as_deepseek_v3():
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = {**tiny_models.hub_spelling(saved("moonlight")), "model_type": "kimi_k2", "quantization_config": quantized}
    assert read(config).family is FAMILIES["deepseek-v3"]
    assert read(config).flat == read(saved("moonlight")).flat


DEFAULTS = [("qwen2-moe", "decoder_sparse_step", 1), ("glm4-moe", "use_qk_norm", False)]
DEFAULTS += [("mixtral", "tie_word_embeddings", False), ("deepseek-v3", "hidden_act", "silu")]


@pytest.mark.parametrize(("case", "key", "value"), DEFAULTS)
def test_a_key_with_one_meaning_may_be_missing_and_is_told(case, key, value):
    config = saved(case)
    with_default = read({**config, key: value})
    del config[key]
    without = read(config)
    assert without.flat == with_default.flat
    assert any(key in note and repr(value) in note for note in without.notes)


def test_unknown_keys_are_told_and_not_read():
    (note,) = read({**saved("mixtral"), "new_thing": 3, "other": None}).notes
    assert "new_thing" in note and "other" not in note


def test_a_window_as_long_as_the_context_or_switched_off_is_none():
    assert read({**saved("mixtral"), "sliding_window": 512}).flat == read(saved("mixtral")).flat
    # Qwen's is read only where its switch is on.
    assert read({**saved("qwen3-moe"), "sliding_window": 16}).flat == read(saved("qwen3-moe")).flat


# ---- what config.json may not say: each line names the key, its value, the rule, and what works instead


ROWS = yaml.load(Path(__file__).with_name("config_refusals.yaml").read_text(), Loader=yaml.CSafeLoader)


@pytest.mark.parametrize(
    ("case", "changes", "says"), ROWS, ids=[f"{case}-{next(iter(changes))}" for case, changes, _ in ROWS]
)
def test_what_is_not_computed_here_or_contradicts_itself_is_refused_by_key(case, changes, says):
    good = saved(case)
    bad = {key: value for key, value in {**good, **changes}.items() if value != {}}
    read(good)
    refused(lambda: read(bad), "--load-hf folder: config.json: ", *says)


@pytest.mark.parametrize("case", ["deepseek-v3", "mixtral"])
def test_prediction_tensors_that_the_configuration_knows_nothing_of_are_refused(case):
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        read(saved(case), prediction=True)


# ---- the presets of published models are their authors' configurations, and count as transformers does


# What lies on the hub beside the weights: of one model of each family all that is said of the architecture and some
# more, which is seen to be passed over; of the others the keys that decide something. The presets name the sources.
CONFIGS = json.loads((Path(__file__).parent / "published_configs.json").read_text())


def test_every_preset_of_a_published_model_is_held_against_its_publication():
    assert set(PUBLISHED) == set(CONFIGS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_what_its_published_configuration_is_read_as(name):
    read = hf_config.settings(CONFIGS[name], has_prediction_layers=False, where=name)
    flat = flatten(build(PUBLISHED[name]))
    assert {key: flat[key] for key in read.flat} == read.flat
    assert [note for note in read.notes if "num_nextn_predict_layers" not in note] == []
    promised = CONFIGS[name].get("num_nextn_predict_layers", 0)
    assert len(read.notes) == promised
    if promised:
        with_them = hf_config.settings(CONFIGS[name], has_prediction_layers=True, where=name)
        assert with_them.flat == {**read.flat, "mtp_num_layers": promised} and not with_them.notes


ONE_OF_A_FAMILY = ["deepseek-v2-lite", "moonlight-16b-a3b", "mixtral-8x7b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b"]
ONE_OF_A_FAMILY += ["glm-4.5-air", "olmoe-1b-7b", "minimax-m2.5", "gpt-oss-20b", "glm-4.7-flash"]


def test_deepseek_v32_as_published_is_deepseek_v3_and_its_indexer():
    v3, sparse = CONFIGS["deepseek-v3"], {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
    config = {**v3, **sparse, "model_type": "deepseek_v32", "num_key_value_heads": 128}
    assert read(config, prediction=True).flat == {**read(v3, prediction=True).flat, "dsa_indexer_topk": 2048}
    run = build({**read(config).flat, "seq_length": 2048})
    assert run.derived.max_position_embeddings == 2048 and run.model.max_position_embeddings == 163840


def test_a_model_that_sees_is_read_by_its_language_model():
    for case, text in (("qwen3-vl-moe", "qwen3-moe"), ("kimi-k25", "moonlight")):
        config = saved(case)
        inner = {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]}
        inner |= {"model_type": saved(text)["model_type"], "architectures": None, "norm_topk_prob": True}
        assert read(inner).flat == read(config).flat and read(config).family.without == read(inner).family.name
        longer, notes = hf_config.with_positions(config, 8192)
        assert read(longer).flat == {**read(config).flat, "max_position_embeddings": 8192} and len(notes) == 1
        for missing in (None, 3, {}):
            refused(lambda: read({**config, "text_config": missing}), "text_config.", "is missing")  # noqa: B023


@pytest.mark.parametrize("name", rows(PUBLISHED, test=ONE_OF_A_FAMILY))
def test_a_preset_has_as_many_parameters_as_transformers_builds(name):
    run = build(PUBLISHED[name])
    vocab = run.model.vocab_size
    assert run.derived.padded_vocab_size(vocab) == vocab
    for config in (CONFIGS[name], hf_config.config_of(run, family_of_run(run), "bfloat16")):
        fields = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
        # transformers knows Kimi-K2 by the class it shares with DeepSeek-V3.
        described = transformers.AutoConfig.for_model(
            fields.pop("model_type").replace("kimi_k2", "deepseek_v3"), **fields
        )
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(described)
        trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        assert sum(trained) == run.derived.parameter_count(vocab)


# ---- --load-hf and --use-checkpoint-args give a run its architecture, as a preset would; contradictions are refused


def folder(path: Path, case: str) -> Path:
    """config.json of a tiny model beside one tensor: no more is read of it."""
    tiny_models.config(case).save_pretrained(path)
    said = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**said, "architectures": None}))
    save_file({"model.norm.weight": torch.ones(64)}, path / "model.safetensors")
    return path


def message_of(*argv: str) -> str:
    return refused(lambda: compat.parse(argv, filled_in))


def test_a_folder_gives_architecture_and_vocabulary_and_nothing_else(tmp_path):
    run = compat.parse(["--load-hf", str(folder(tmp_path, "deepseek-v3")), "--seq-length", "32"], filled_in)
    assert (run.model.num_layers, run.model.vocab_size, run.moe.num_experts) == (4, tiny_models.VOCABULARY, 16)
    assert run.model.multi_latent_attention and run.moe.moe_router_enable_expert_bias
    assert run.model.max_position_embeddings == 2560 and run.model.mtp_num_layers is None
    own = {"load_hf", "max_position_embeddings", "moe_router_dtype", *architecture_keys()}
    assert {name for name, value in flatten(run).items() if value != flatten(Run())[name]} <= own | {"seq_length"}
    assert run.model.seq_length == 32
    # a setting that may differ is the user's
    run = compat.parse(["--load-hf", str(tmp_path), "--max-position-embeddings", "512"], filled_in)
    assert run.model.max_position_embeddings == 512


def test_a_file_contradicts_as_a_flag_does(tmp_path):
    where = str(folder(tmp_path / "model", "mixtral"))
    (tmp_path / "run.yaml").write_text("hidden_size: 128\nlr: 1e-4\n")
    assert "--hidden-size 128" in message_of("--config", str(tmp_path / "run.yaml"), "--load-hf", where)


@pytest.mark.parametrize(
    "flags",
    ["--num-layers 4 --hidden-size 64", "--moe-layer-freq [1,1,1,1]", "--kv-channels 16", "--num-query-groups 2",
     "--group-query-attention"],
)  # fmt: skip
def test_the_same_in_other_words_is_no_contradiction(tmp_path, flags):
    where = str(folder(tmp_path, "mixtral"))
    plain = compat.parse(["--load-hf", where], filled_in)
    assert compat.parse(["--load-hf", where, *flags.split()], filled_in) == plain


def test_a_step_gives_its_architecture_and_no_more(tmp_path):
    saved = build({"num_layers": 3, "hidden_size": 96, "vocab_size": 77, "num_experts": 4, "lr": 0.5, "bf16": True})
    write_step(tmp_path, 5, config=flatten(saved))
    run = compat.parse(["--load", str(tmp_path), "--use-checkpoint-args"], filled_in)
    assert (run.model.num_layers, run.model.hidden_size, run.model.vocab_size) == (3, 96, 77)
    assert run.moe.num_experts == 4
    assert run.optimizer.lr == Run().optimizer.lr and not run.precision.bf16
    said = message_of("--load", str(tmp_path), "--use-checkpoint-args", "--num-layers", "4")
    assert "--num-layers 4" in said and "there: 3" in said and "iter_0000005" in said


def test_a_run_that_has_saved_goes_on_without_the_folder_that_it_was_imported_from(tmp_path):
    root = tmp_path / "run"
    argv = ["--load-hf", str(folder(tmp_path / "hf", "mixtral")), "--load", str(root), "--save", str(root)]
    first = compat.parse(argv, filled_in)
    write_step(root, 5, config=flatten(first))
    (tmp_path / "hf").rename(tmp_path / "gone")
    assert flatten(compat.parse(argv, filled_in)) == flatten(first)
    said = message_of(*argv, "--hidden-size", "96")
    assert "--hidden-size 96 (there: 64)" in said and "iter_0000005" in said


@pytest.mark.parametrize(
    ("case", "flags", "fields", "says"),
    [
        # of another kind: the folder's context is the one before extension
        (
            "mixtral",
            "--rope-type yarn --rotary-scaling-factor 4 --seq-length 2048",
            {"original_max_position_embeddings": 512, "rotary_base": 1e6, "max_position_embeddings": 2048},
            "rope: default -> yarn x4, trained 512 -> 2048, attention amplitude 1.14",
        ),
        # of the same kind: what is not given stays
        (
            "qwen2",
            "--rope-type yarn --rotary-scaling-factor 128",
            {"original_max_position_embeddings": 8, "beta_slow": 0.05, "max_position_embeddings": 1024},
            "rope: yarn x4 -> yarn x128, trained 512 -> 1024, attention amplitude 1.49",
        ),
        (
            "llama",
            "--rope-type rope --rotary-base 5e6 --seq-length 1024",
            {"rotary_scaling_factor": 1.0, "low_freq_factor": 1.0, "max_position_embeddings": 1024},
            "rope: llama3 x4 -> default, trained 512 -> 1024, attention amplitude 1, rotary_base 100.0 -> 5000000.0",
        ),
    ],
)
def test_a_model_is_trained_on_with_another_rotary_embedding_where_its_type_is_given(
    tmp_path, case, flags, fields, says
):
    where = str(folder(tmp_path / "hf", case))
    before = compat.parse(["--load-hf", where], filled_in)
    argv = ["--load-hf", where, "--load", str(tmp_path / "run"), "--save", str(tmp_path / "run"), *flags.split()]
    run = compat.parse(argv, filled_in)
    assert {name: getattr(run.model, name) for name in fields} == fields
    assert change(before.model, run.model) == says
    write_step(tmp_path / "run", 5, config=flatten(run))
    assert flatten(compat.parse(argv, filled_in)) == flatten(run), "the second start takes it from the run's own step"
    config = saved(case)
    for said in (config, tiny_models.hub_spelling(config)):
        written, (note,) = hf_config.with_rotation(said, read(said).flat, run)
        assert note == f"config.json: {says}"
        assert hf_config.differences(run, read(written).flat) == []
        assert loaded(written).model.rotary_emb.attention_scaling == pytest.approx(amplitude(run.model))
        assert hf_config.with_rotation(written, read(written).flat, run) == (written, [])
    assert "--rope-type beside it" in message_of("--load-hf", where, "--rotary-base", "77")


def test_a_pretrained_checkpoint_is_loaded_until_the_run_has_a_step_of_its_own(tmp_path):
    pretrained, root = tmp_path / "pretrained", tmp_path / "run"
    write_step(pretrained, 7, config=flatten(build({"num_layers": 3, "vocab_size": 77})))
    argv = ["--pretrained-checkpoint", str(pretrained), "--load", str(root), "--save", str(root)]
    first = compat.parse(argv, filled_in).checkpoint
    assert (first.load, first.finetune, first.save) == (str(pretrained), True, str(root))
    assert compat.parse([*argv, "--use-checkpoint-args"], filled_in).model.num_layers == 3
    write_step(root, 5, config=flatten(Run()))
    resumed = compat.parse(argv, filled_in).checkpoint
    assert (resumed.load, resumed.finetune) == (str(root), False)
    alone = compat.parse(argv[:2], filled_in).checkpoint
    assert (alone.load, alone.finetune) == (str(pretrained), True)
    # the defaults of the architecture stay open, and weights come from one folder
    assert any("--norm-epsilon" in note for note in compat.parse([*argv[:2], "--use-mcore-models"], filled_in).warnings)
    said = message_of(*argv[:2], "--load-hf", str(folder(tmp_path / "hf", "mixtral")))
    assert f"--pretrained-checkpoint {pretrained}" in said and "--load-hf" in said
