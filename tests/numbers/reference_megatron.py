"""megatron-core's own GPTModel, optimizer and schedule, made from a list of Megatron-LM's arguments.

The mapping from arguments to the engine's settings is that of Megatron-LM (`megatron/training`), written down anew: it
shares nothing with `model/engine_config.py`, which it is compared with.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

# Megatron-LM's defaults of the flags that the lists may leave open.
_WITHOUT_DEFAULT = """num-layers hidden-size ffn-hidden-size num-attention-heads seq-length max-position-embeddings
    vocab-size q-lora-rank num-experts moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-router-num-groups
    moe-router-group-topk moe-router-topk-scaling-factor moe-z-loss-coeff micro-batch-size global-batch-size train-iters
    lr lr-decay-iters""".split()
_NUMBERS: dict[str, Any] = {
    **{f"--{name}": None for name in _WITHOUT_DEFAULT},
    "--num-query-groups": 1,
    "--make-vocab-size-divisible-by": 128,
    "--rotary-base": 10000,
    "--norm-epsilon": 1e-5,
    "--init-method-std": 0.02,
    "--attention-dropout": 0.1,
    "--hidden-dropout": 0.1,
    "--kv-lora-rank": 32,
    "--qk-head-dim": 128,
    "--qk-pos-emb-head-dim": 64,
    "--v-head-dim": 128,
    "--rotary-scaling-factor": 1.0,
    "--mscale": 1.0,
    "--mscale-all-dim": 0.0,
    "--moe-router-topk": 2,
    "--moe-router-bias-update-rate": 1e-3,
    "--expert-model-parallel-size": 1,
    "--moe-aux-loss-coeff": 0.0,
    "--min-lr": 0.0,
    "--lr-warmup-iters": 0,
    "--weight-decay": 0.01,
    "--adam-beta1": 0.9,
    "--adam-beta2": 0.999,
    "--adam-eps": 1e-8,
    "--clip-grad": 1.0,
    "--seed": 1234,
}
_TEXTS = {
    "--normalization": "LayerNorm",
    "--position-embedding-type": "learned_absolute",
    "--moe-layer-freq": "1",
    "--moe-router-score-function": "softmax",
    "--moe-router-load-balancing-type": "aux_loss",
    "--moe-router-dtype": None,
    "--moe-token-dispatcher-type": "allgather",
    "--lr-decay-style": "linear",
}
# Arguments that the engine's settings are named after.
_SAME_NAMES = """num_layers hidden_size ffn_hidden_size num_attention_heads normalization init_method_std
    add_bias_linear attention_dropout hidden_dropout qk_layernorm moe_ffn_hidden_size moe_aux_loss_coeff
    moe_shared_expert_intermediate_size moe_z_loss_coeff moe_token_dispatcher_type expert_model_parallel_size""".split()
_LATENT_NAMES = """q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_base rotary_scaling_factor
    mscale mscale_all_dim""".split()
_SWITCHES = (
    "--swiglu",
    "--group-query-attention",
    "--qk-layernorm",
    "--untie-embeddings-and-output-weights",
    "--multi-latent-attention",
    "--moe-router-pre-softmax",
    "--moe-router-enable-expert-bias",
    "--moe-grouped-gemm",
)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments as Megatron-LM's own parser does, of those that a test uses."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag, default in _NUMBERS.items():
        parser.add_argument(flag, type=_number, default=default)
    for flag, text in _TEXTS.items():
        parser.add_argument(flag, default=text)
    for flag in _SWITCHES:
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    args = parser.parse_args(list(words))
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = int((4 * args.hidden_size * 2 / 3) / 64) * 64 if args.swiglu else 4 * args.hidden_size
    return args


def _number(word: str) -> float:
    return float(word) if re.search(r"[.e]", word) else int(word)


def engine_config(args: argparse.Namespace) -> TransformerConfig:
    """Return the engine's configuration as Megatron-LM makes it from its arguments."""
    freq = args.moe_layer_freq
    values: dict[str, Any] = {
        **_named(args, _SAME_NAMES),
        **{name: value for name, value in vars(args).items() if name.startswith("moe_router_")},
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "layernorm_epsilon": args.norm_epsilon,
        "num_moe_experts": args.num_experts,
        "moe_layer_freq": eval(freq, {}) if "[" in freq else int(freq),  # as Megatron-LM does
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    if args.swiglu:
        values |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if not args.multi_latent_attention:
        return TransformerConfig(**values)
    return MLATransformerConfig(**values, **_named(args, _LATENT_NAMES), multi_latent_attention=True, rope_type="yarn")


def _named(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


class PlainAttention(torch.nn.Module):
    """Causal attention in plain torch: the engine's own wants values as wide as keys, but with Transformer Engine."""

    def __init__(self, config: TransformerConfig, *, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return [S, B, N x D] of query, key [S, B, N, Dk] and value [S, B, N, D]."""
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self.softmax_scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(2)


def _block(config: TransformerConfig, normalization: str) -> Any:
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=normalization)
    for layer in block.layer_specs:
        if config.multi_latent_attention:
            layer.submodules.self_attention.submodules.core_attention = PlainAttention
    return block


class EngineTrainer:
    """The engine's GPTModel in its DDP wrapper, with its optimizer and schedule, as `pretrain_gpt.py` makes them."""

    def __init__(self, words: Sequence[str], pg_collection: Any, *, distributed: bool = False) -> None:
        self.args = args = arguments(words)
        self.config = config = engine_config(args)
        rows = args.make_vocab_size_divisible_by
        # Where it is missing, latent attention asks whether its layers are of a class that is none (S12).
        with mock.patch.object(multi_latent_attention, "HAVE_TE", False):
            model = GPTModel(
                config,
                _block(config, args.normalization),
                vocab_size=-(-args.vocab_size // rows) * rows,
                max_sequence_length=args.max_position_embeddings,
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                rotary_base=args.rotary_base,
                pg_collection=pg_collection,
            )
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=False, use_distributed_optimizer=distributed),
            model,
            pg_collection=pg_collection,
        )
        settings = OptimizerConfig(
            **_named(args, ("lr", "min_lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps")),
            use_distributed_optimizer=distributed,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model], use_gloo_process_groups=False)
        # Counted in sequences, as Megatron-LM counts iterations too.
        batch = args.global_batch_size
        decay = (args.lr_decay_iters or args.train_iters) * batch
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=args.lr,
            min_lr=args.min_lr,
            lr_warmup_steps=args.lr_warmup_iters * batch,
            lr_decay_steps=decay,
            lr_decay_style=args.lr_decay_style,
            start_wd=args.weight_decay,
            end_wd=args.weight_decay,
            wd_incr_steps=args.train_iters * batch,
            wd_incr_style="constant",
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss

    def step(self, tokens: Tensor) -> tuple[float, float, float]:
        """Train one step on [global batch, S + 1] tokens; return its loss, gradient norm and learning rate."""
        args = self.args
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        rate = self.optimizer.param_groups[0]["lr"]
        micro_batches = tokens.split(args.micro_batch_size)
        shown = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(micro_batches),
            model=[self.model],
            num_microbatches=len(micro_batches),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        updated, norm, _ = self.optimizer.step()
        assert updated
        self.scheduler.step(increment=args.global_batch_size)
        return sum(float(one["loss"]) for one in shown) / len(shown), float(norm), rate


def _forward_step(micro_batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    rows = next(micro_batches)
    length = rows.shape[1] - 1
    positions = torch.arange(length).expand(rows.shape[0], -1)
    future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

    def loss_function(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, number = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
        return total, number, {"loss": total.detach() / number}

    return model(rows[:, :-1], positions, future, labels=rows[:, 1:]), loss_function
