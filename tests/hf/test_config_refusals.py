"""What config.json may not say: each line names the key, its value, the rule, and what works instead."""

from __future__ import annotations

import copy

import pytest

from megatron_moe.config.errors import ConfigError
from tests.config.refused import refused
from tests.hf.test_config import read, saved

MISSING = "(the key is not there)"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
LENGTH = "rope_parameters.original_max_position_embeddings"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
EVERY = "deepseek-v3"

ROWS: list[tuple[str, dict, list[str]]] = [
    # which model it is
    (EVERY, {"model_type": MISSING}, ["model_type None", "deepseek_v3, kimi_k2, mixtral"]),
    (EVERY, {"model_type": ["mixtral"]}, ["model_type ['mixtral']", "qwen3_moe"]),
    (EVERY, {"model_type": "olmoe"}, ["'olmoe'", "over all heads", "qwen3_moe"]),
    (EVERY, {"model_type": "llama"}, ["'llama'", "dense"]),
    (EVERY, {"model_type": "unheard_of"}, ["'unheard_of'", "not one of the families"]),
    (EVERY, {"architectures": ["DeepseekV3ForSequenceClassification"]}, ["architectures", "DeepseekV3ForCausalLM"]),
    (EVERY, {"architectures": ["DeepseekV2ForCausalLM"]}, ["architectures", "DeepseekV3ForCausalLM"]),
    # sizes
    (EVERY, {"hidden_size": MISSING}, ["hidden_size is missing", "integer of at least 1"]),
    (EVERY, {"hidden_size": 64.0}, ["hidden_size 64.0", "integer"]),
    (EVERY, {"hidden_size": True}, ["hidden_size True", "integer"]),
    (EVERY, {"hidden_size": -64}, ["hidden_size -64", "integer of at least 1"]),
    (EVERY, {"vocab_size": 0}, ["vocab_size 0", "at least 2"]),
    (EVERY, {"num_hidden_layers": 10**9}, ["num_hidden_layers 1000000000", "from 1 to 10000"]),
    (EVERY, {"n_routed_experts": 10**9}, ["n_routed_experts 1000000000", "from 2 to"]),
    (EVERY, {"kv_lora_rank": 2**31}, ["kv_lora_rank 2147483648"]),
    (EVERY, {"max_position_embeddings": MISSING}, ["max_position_embeddings is missing"]),
    (EVERY, {"rms_norm_eps": MISSING}, ["rms_norm_eps is missing", "above 0"]),
    (EVERY, {"rms_norm_eps": float("nan")}, ["rms_norm_eps nan", "finite"]),
    (EVERY, {"rms_norm_eps": "1e-6"}, ["rms_norm_eps '1e-6'"]),
    (EVERY, {"tie_word_embeddings": 1}, ["tie_word_embeddings 1", "true or false"]),
    (EVERY, {"hidden_act": "gelu"}, ["hidden_act 'gelu'", "'silu'"]),
    (EVERY, {"dtype": "int8"}, ["dtype 'int8'", "bfloat16"]),
    (EVERY, {"dtype": "float32", "torch_dtype": "bfloat16"}, ["torch_dtype 'bfloat16'", "dtype 'float32'"]),
    # two words for one thing
    ("qwen3-moe", {"num_experts": 16}, ["num_local_experts 8", "contradicts num_experts 16"]),
    (EVERY, {"num_local_experts": 8}, ["num_local_experts 8", "contradicts n_routed_experts 16"]),
    (EVERY, {"num_mtp_layers": 1, "num_nextn_predict_layers": 2}, ["contradicts num_nextn_predict_layers 2"]),
    # latent attention
    (EVERY, {"attention_bias": True}, ["attention_bias True", "False"]),
    (EVERY, {"rope_interleave": False}, ["rope_interleave False", "True"]),
    (EVERY, {"num_key_value_heads": 2}, ["num_key_value_heads 2", "use 4"]),
    (EVERY, {"q_lora_rank": MISSING}, ["q_lora_rank is missing", "null"]),
    (EVERY, {"qk_head_dim": 32}, ["qk_head_dim 32", "24"]),
    (EVERY, {"qk_rope_head_dim": 9, "qk_head_dim": 25}, ["qk_rope_head_dim 9", "even"]),
    ("deepseek-v2", {"mlp_bias": True}, ["mlp_bias True", "False"]),
    # experts
    (EVERY, {"first_k_dense_replace": MISSING}, ["first_k_dense_replace is missing"]),
    (EVERY, {"first_k_dense_replace": 4}, ["first_k_dense_replace 4", "none of the 4 layers"]),
    (EVERY, {"moe_layer_freq": 2}, ["moe_layer_freq 2", "works: 1"]),
    (EVERY, {"moe_layer_freq": [1, 0, 1, 1]}, ["moe_layer_freq [1, 0, 1, 1]", "works: 1 or [0, 1, 1, 1]"]),
    (EVERY, {"n_shared_experts": MISSING}, ["n_shared_experts is missing", "at least 1"]),
    (EVERY, {"num_experts_per_tok": 17}, ["num_experts_per_tok 17", "there are 16"]),
    ("mixtral", {"num_experts_per_tok": MISSING}, ["num_experts_per_tok is missing"]),
    (EVERY, {"routed_scaling_factor": MISSING}, ["routed_scaling_factor is missing"]),
    (EVERY, {"routed_scaling_factor": 0.0}, ["routed_scaling_factor 0.0", "above 0"]),
    # routing
    (EVERY, {"norm_topk_prob": MISSING}, ["norm_topk_prob is missing", "true or false"]),
    ("qwen3-moe", {"norm_topk_prob": MISSING}, ["norm_topk_prob is missing", "true or false"]),
    ("deepseek-v2", {"norm_topk_prob": True}, ["norm_topk_prob True", "False"]),
    ("deepseek-v2", {"topk_method": MISSING}, ["topk_method is missing", "group_limited_greedy"]),
    ("deepseek-v2", {"topk_method": "noaux_tc"}, ["topk_method 'noaux_tc'", "'greedy'"]),
    (EVERY, {"topk_method": "greedy"}, ["topk_method 'greedy'", "'noaux_tc'"]),
    ("deepseek-v2", {"scoring_func": "sigmoid"}, ["scoring_func 'sigmoid'", "'softmax'"]),
    (EVERY, {"scoring_func": "softmax"}, ["scoring_func 'softmax'", "'sigmoid'"]),
    (EVERY, {"n_group": MISSING}, ["n_group is missing"]),
    (EVERY, {"n_group": 3}, ["n_group 3", "divide the 16 experts"]),
    (EVERY, {"topk_group": 5}, ["topk_group 5", "at most n_group 4"]),
    (EVERY, {"topk_group": 1, "num_experts_per_tok": 5}, ["topk_group 1", "have fewer than the 5"]),
    (EVERY, {"n_group": 16, "topk_group": 4}, ["n_group 16", "fewer groups work"]),
    # grouped-query attention
    ("mixtral", {"num_key_value_heads": MISSING}, ["num_key_value_heads is missing"]),
    ("mixtral", {"num_key_value_heads": 3}, ["num_key_value_heads 3", "divide num_attention_heads 4"]),
    ("mixtral", {"hidden_size": 66}, ["head_dim None", "no multiple"]),
    ("qwen3-moe", {"head_dim": 15}, ["head_dim 15", "pair"]),
    ("mixtral", {"sliding_window": 256}, ["sliding_window 256", "null works"]),
    ("qwen2-moe", {"use_sliding_window": True}, ["use_sliding_window True", "False"]),
    ("qwen2-moe", {"layer_types": ["sliding_attention"] * 4}, ["layer_types", "full_attention"]),
    ("qwen2-moe", {"attention_bias": True}, ["attention_bias True", "False"]),
    ("qwen3-moe", {"attention_bias": True}, ["attention_bias True", "False"]),
    ("qwen3-moe", {"qkv_bias": True}, ["qkv_bias True", "False"]),
    ("qwen3-moe", {"use_qk_norm": False}, ["use_qk_norm False", "True"]),
    ("qwen3-moe", {"shared_expert_intermediate_size": 512}, ["shared_expert_intermediate_size 512", "works: 0"]),
    ("qwen3-moe", {"decoder_sparse_step": 5}, ["decoder_sparse_step 5", "none of the 4 layers"]),
    ("qwen3-moe", {"mlp_only_layers": [4]}, ["mlp_only_layers [4]", "from 0 to 3"]),
    ("qwen3-moe", {"mlp_only_layers": False}, ["mlp_only_layers False", "list"]),
    ("qwen3-moe", {"num_nextn_predict_layers": 1}, ["num_nextn_predict_layers 1", "0 works"]),
    ("mixtral", {"clip_qkv": 8.0}, ["clip_qkv 8.0", "null"]),
    # rotary embedding
    (EVERY, {"rope_parameters": None}, ["rope_theta is missing", "Mixtral's is 1000000.0"]),
    (EVERY, {"rope_theta": 5.0}, ["rope_theta 5.0", "rope_parameters.rope_theta is 10000.0"]),
    (EVERY, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["rope_parameters", "'full_attention'"]),
    (EVERY, {"rope_parameters": [1]}, ["rope_parameters [1]", "dictionary"]),
    (EVERY, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, ["rope_scaling", "contradicts rope_parameters"]),
    (EVERY, {"rope_parameters": {**YARN, "type": "linear"}}, ["rope_parameters.type 'linear'", "rope_type 'yarn'"]),
    (EVERY, {"rope_parameters": {**YARN, "rope_type": "linear"}}, ["rope_parameters.rope_type 'linear'", "'yarn'"]),
    (EVERY, {"rope_parameters": {**YARN, "factor": None}}, ["rope_parameters.factor None", "above 0"]),
    (EVERY, {"rope_parameters": {**YARN, "factor": 0.5}}, ["rope_parameters.factor 0.5", "at least 1"]),
    (EVERY, {"rope_parameters": {**YARN, "original_max_position_embeddings": None}}, [f"{LENGTH} None"]),
    (
        EVERY,
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 4, "rope_theta": 2.0}},
        [f"{LENGTH} 4", "some thousand"],
    ),
    (EVERY, {"rope_parameters": {**YARN, "truncate": False}}, ["rope_parameters.truncate False", "True"]),
    (EVERY, {"rope_parameters": {**YARN, "long_factor": [1.0]}}, ["rope_parameters.long_factor", "beta_fast"]),
    (EVERY, {"rope_parameters": {**YARN, "beta_fast": 1, "beta_slow": 2}}, ["rope_parameters.beta_fast 1", "2.0"]),
    (EVERY, {"rope_parameters": {**YARN, "attention_factor": 0.5}}, ["rope_parameters.attention_factor 0.5", "1.0"]),
    (EVERY, {"rope_parameters": {**YARN, "factor": 1.0, "attention_factor": 1.2}}, ["attention_factor 1.2", "drop it"]),
    (EVERY, {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0}}, ["rope_parameters.factor 4.0", "not stretched"]),
    (EVERY, {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5", "1.0 works"]),
    ("mixtral", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5", "1.0 works"]),
    ("glm4-moe", {"rope_parameters": {"rope_theta": 1e6}}, ["partial_rotary_factor is missing", "0.5"]),
    *(
        (case, {"rope_parameters": {**YARN, "rope_type": kind}}, [f"rope_parameters.rope_type '{kind}'", "'default'"])
        for case in ("mixtral", "qwen2-moe", "qwen3-moe")
        for kind in ("yarn", "linear", "dynamic", "llama3", "longrope")
    ),
    ("glm4-moe", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, ["rope_type 'yarn'", "grouped-query"]),
    # quantisation
    (EVERY, {"quantization_config": "fp8"}, ["quantization_config 'fp8'", "dictionary"]),
    (EVERY, {"quantization_config": {**FP8, "quant_method": "awq"}}, ["quant_method 'awq'", '"fp8"']),
    (EVERY, {"quantization_config": {**FP8, "fmt": "e5m2"}}, ["quantization_config.fmt 'e5m2'", "e4m3"]),
    (EVERY, {"quantization_config": {**FP8, "weight_block_size": None}}, ["quantization_config.weight_block_size"]),
]


@pytest.mark.parametrize(
    ("case", "changes", "says"), ROWS, ids=[f"{case}-{next(iter(changes))}" for case, changes, _ in ROWS]
)
def test_what_is_not_computed_here_or_contradicts_itself_is_refused_by_key(case, changes, says):
    good = saved(case)
    bad = {key: value for key, value in {**good, **copy.deepcopy(changes)}.items() if value != MISSING}
    read(good)
    refused(lambda: read(bad), "--load-hf folder: config.json: ", *says)


@pytest.mark.parametrize("case", ["deepseek-v3", "mixtral"])
def test_prediction_tensors_that_the_configuration_knows_nothing_of_are_refused(case):
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        read(saved(case), prediction=True)
