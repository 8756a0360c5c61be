"""Known defects of the rest of megatron-core. No torch.

S: met by running it without CUDA, Transformer Engine and apex. N: found while this project was built.
"""

from __future__ import annotations

from megatron_moe.config import derived
from megatron_moe.platform.defect import (
    NEWEST,
    Defect,
    always,
    auxiliary_losses,
    distributed_and_resumable,
    experts,
    tp_size,
)

RUNNING_DEFECTS = (
    Defect(
        "S1",
        "with two pipeline stages of several chunks each, batched sends are paired with the wrong receives",
        "pipeline_parallel/p2p_communication.py",
        lambda run, _: (
            run.parallel.pipeline_model_parallel_size == 2 and derived.virtual_pipeline_size(run) is not None
        ),
        "overridden",
        "sends and receives are single",
        (("megatron_moe/model/engine_config.py", '"batch_p2p_comm": virtual is None'),),
    ),
    Defect(
        "S2",
        "latent attention does not sum the gradient of the shared rotary key over tensor-parallel ranks",
        "transformer/multi_latent_attention.py",
        lambda run, _: run.model.multi_latent_attention and tp_size(run) > 1,
        "overridden",
        "our latent attention sums it",
        (("megatron_moe/model/mla.py", "_shared_by_heads"),),
    ),
    Defect(
        "S4",
        "an all-reduce over tensor-parallel ranks leaves a tensor that is not contiguous as it was",
        "tensor_parallel/mappings.py, _reduce",
        lambda run, _: tp_size(run) > 1,
        "overridden",
        "our modules sum with collectives of their own",
        (("megatron_moe/parallel/collectives.py", "def sum_over_ranks"),),
        fixed_in=NEWEST,
    ),
    Defect(
        "S5",
        "with TP above 1, expert-TP 1 and EP 1, the experts' gradients are never reduced over TP ranks",
        "PR #5916; tensor_parallel/layers.py, moe/experts.py: allreduce",
        lambda run, _: (
            experts(run, _)
            and tp_size(run) > 1
            and derived.expert_tensor_parallel_size(run) == 1
            and run.parallel.expert_model_parallel_size == 1
        ),
        "overridden",
        "experts are always reduced over the ranks that hold the same experts",
        (("megatron_moe/moe/experts.py", "parameter.allreduce = False"),),
        fixed_in=(0, 19, 0),
    ),
    Defect(
        "S6",
        "weights initialised on the CPU are the same for the experts of all expert-parallel ranks",
        "tensor_parallel/layers.py, _initialize_affine_weight_cpu",
        lambda run, _: run.parallel.expert_model_parallel_size > 1,
        "overridden",
        "each expert's weights have a random stream of their own",
        (("megatron_moe/moe/experts.py", "def reset_parameters"),),
    ),
    Defect(
        "S7",
        "the distributed optimizer cannot resume torch's Adam: all parameters share one step count",
        "optimizer/distrib_optimizer.py",
        distributed_and_resumable,
        "overridden",
        "an Adam with one step count per group, where Transformer Engine and apex are absent",
        (("megatron_moe/platform/adam.py", "class Adam"),),
    ),
    Defect(
        "S9",
        "a checkpoint's writer without psutil, or one that is killed, is waited for forever",
        "dist_checkpointing/strategies/filesystem_async.py",
        lambda run, _: run.checkpoint.save is not None,
        "overridden",
        "checkpoints are written by the ranks themselves, and psutil is a dependency",
        (("megatron_moe/checkpoint/writer.py", "class _HashingWriter"), ("setup.py", "psutil")),
    ),
    Defect(
        "S10",
        "the router's gate looks for a kernel's name that is not defined without Transformer Engine",
        "transformer/moe/moe_utils.py, te_general_gemm",
        experts,
        "overridden",
        "our router has a gate of its own",
        (("megatron_moe/moe/grouped_gemm.py", "class _GateProduct"),),
        fixed_in=NEWEST,
    ),
    Defect(
        "S11",
        "recomputing without keeping the output asks for Transformer Engine by default",
        "tensor_parallel/random.py, CheckpointWithoutOutput",
        lambda run, _: run.training.recompute_granularity == "selective",
        "overridden",
        "it is told that there is no FP8",
        (("megatron_moe/moe/recompute.py", "CheckpointWithoutOutput(fp8=None)"),),
    ),
    Defect(
        "S12",
        "latent attention cannot be built without Transformer Engine",
        "transformer/multi_latent_attention.py",
        lambda run, _: run.model.multi_latent_attention,
        "overridden",
        "our latent attention needs none",
        (("megatron_moe/model/mla.py", "class LatentAttention"),),
    ),
    Defect(
        "S13",
        "the norm without Transformer Engine refuses sequence parallelism",
        "transformer/torch_norm.py",
        lambda run, _: run.parallel.sequence_parallel,
        "overridden",
        "our norm marks its weight for the sum over ranks",
        (("megatron_moe/model/norm.py", "class RMSNorm"),),
    ),
    Defect(
        "S15",
        "layer specs name Transformer Engine's classes where it is absent",
        "models/gpt/gpt_layer_specs.py",
        always,
        "not used",
        "layers are built from specs of our own",
        (("megatron_moe/model/spec.py", "def block_spec"),),
    ),
    Defect(
        "S16",
        "reading a checkpoint's common state calls a method that a path given as text does not have",
        "dist_checkpointing/strategies/common.py",
        always,
        "not used",
        "what a step lacks is found before the engine reads it",
        (("megatron_moe/checkpoint/dist.py", "def check_trusted"),),
        fixed_in=NEWEST,
    ),
    Defect(
        "S17",
        "the default format of a distributed optimizer's checkpoint fails on save",
        "optimizer/distrib_optimizer.py, fully_sharded_model_space",
        distributed_and_resumable,
        "overridden",
        "another format is asked for",
        (("megatron_moe/checkpoint/optimizer.py", "fully_reshardable"),),
    ),
    Defect(
        "S18",
        "--hysteresis counts overflows since the scale last grew, not overflows in a row",
        "optimizer/grad_scaler.py",
        lambda run, _: run.precision.fp16 and run.precision.loss_scale is None and run.precision.hysteresis > 1,
        "kept",
        "as in Megatron-LM; --hysteresis 1 halves at every overflow",
        (("megatron_moe/training/optimizer.py", "class SharedLossScale"),),
    ),
    Defect(
        "S19",
        "a reduce-scatter with fp32 sums replaces a function of the module for all groups",
        "distributed/param_and_grad_buffer.py",
        always,
        "not used",
        "no flag asks for it",
        (),
    ),
    Defect(
        "S20",
        "checkpoints of a MoE layer have other keys with Transformer Engine's specs than without",
        "models/gpt/gpt_layer_specs.py",
        experts,
        "overridden",
        "our specs give every norm a place and name of its own",
        (("megatron_moe/model/spec.py", "pre_mlp_layernorm=chosen.norm"),),
    ),
    Defect(
        "S21",
        "a loss kept for the log is divided with the one that is differentiated, in place",
        "pipeline_parallel/schedules.py",
        always,
        "overridden",
        "the logged loss is a copy",
        (("megatron_moe/model/loss.py", "clone()"),),
    ),
    Defect(
        "S22",
        "a loss function that returns two values has its gradients multiplied by CP",
        "pipeline_parallel/schedules.py",
        lambda run, _: run.parallel.context_parallel_size > 1,
        "overridden",
        "ours returns three",
        (("megatron_moe/model/loss.py", "def loss_func"),),
    ),
    Defect(
        "S23",
        "in fp32 and bf16 a step with NaN gradients is taken",
        "optimizer/optimizer.py: only a gradient scaler looks",
        always,
        "overridden",
        "a step whose loss or gradient norm is not finite is skipped on all ranks",
        (("megatron_moe/training/step.py", "math.isfinite"),),
    ),
    Defect(
        "S24",
        "flipped bits in a checkpoint's data are not detected",
        "dist_checkpointing",
        lambda run, _: run.checkpoint.load is not None,
        "overridden",
        "every file has a SHA-256 in a manifest, and is hashed before any weight is used",
        (("megatron_moe/checkpoint/load.py", "checked_content"),),
    ),
    Defect(
        "S25",
        "logging auxiliary losses fails on a pipeline stage without MoE layers",
        "transformer/moe/moe_utils.py, reduce_aux_losses_tracker_across_ranks",
        lambda run, _: bool(auxiliary_losses(run)) and run.parallel.pipeline_model_parallel_size > 1,
        "overridden",
        "our metrics know which layers a stage has",
        (("megatron_moe/training/finalize_model_grads.py", "def _global_aux_losses"),),
        fixed_in=NEWEST,
    ),
    Defect(
        "S26",
        "attention without Transformer Engine refuses context parallelism",
        "transformer/dot_product_attention.py",
        lambda run, _: run.parallel.context_parallel_size > 1,
        "overridden",
        "our core attention gathers keys and values",
        (("megatron_moe/model/context_parallel.py", "def attend_chunks"),),
    ),
)

FOUND_DEFECTS = (
    Defect(
        "N1",
        "each chained optimizer has a loss scale of its own, and the loss is multiplied by the first one's",
        "optimizer/optimizer.py, ChainedOptimizer",
        lambda run, _: experts(run, _) and run.precision.fp16 and run.precision.loss_scale is None,
        "overridden",
        "dense and expert weights share one scale",
        (("megatron_moe/training/optimizer.py", "class SharedLossScale"),),
    ),
    Defect(
        "N2",
        "a model of two dtypes is saved with one weight's optimizer state under another's name",
        "optimizer/distrib_optimizer.py, model_param_group_index_map",
        lambda run, _: bool(run.precision.keep_fp32) and run.optimizer.use_distributed_optimizer,
        "overridden",
        "positions are settled by the order of the buffers",
        (("megatron_moe/training/optimizer.py", "def _settle_positions"),),
    ),
    Defect(
        "N3",
        "weights that the engine does not initialise itself are not marked as split, and its norm skips their parts",
        "tensor_parallel/layers.py with perform_initialization off",
        lambda run, _: tp_size(run) > 1,
        "overridden",
        "weights are marked where they are initialised",
        (("megatron_moe/model/initialize.py", "def _mark"),),
        fixed_in=NEWEST,
    ),
    Defect(
        "N9",
        "a micro-batch without targets of a multi-token prediction layer makes all gradients NaN",
        "models/gpt/gpt_model.py: division by the number of targets",
        lambda run, _: run.model.mtp_num_layers is not None and not run.optimizer.calculate_per_token_loss,
        "overridden",
        "these losses go with their targets' and are divided with them",
        (("megatron_moe/model/mtp.py", "class FurtherPredictions"),),
        fixed_in=NEWEST,
    ),
    Defect(
        "N10",
        "with tied embeddings and multi-token prediction, the last pipeline stage has a table that gets no gradient",
        "models/gpt/gpt_model.py: an output layer beside the embedding that stands for it",
        lambda run, _: (
            run.model.mtp_num_layers is not None
            and not run.model.untie_embeddings_and_output_weights
            and run.parallel.pipeline_model_parallel_size > 1
        ),
        "overridden",
        "the second table is taken away",
        (("megatron_moe/model/mtp.py", "def without_second_table"),),
    ),
    Defect(
        "N11",
        "the gradient of latent attention's query norm is multiplied by TP where there is no sequence parallelism",
        "distributed/finalize_model_grads.py: sums whatever is called q_layernorm",
        lambda run, _: (
            run.model.multi_latent_attention
            and run.model.q_lora_rank is not None
            and run.model.qk_layernorm
            and tp_size(run) > 1
            and not run.parallel.sequence_parallel
        ),
        "overridden",
        "the weight is marked for a mean instead",
        (("megatron_moe/model/mla.py", "average_gradients_across_tp_domain"),),
    ),
    Defect(
        "N12",
        "rows that only pad the vocabulary take part in the softmax, so that the loss depends on TP",
        "models/gpt/gpt_model.py; tensor_parallel/cross_entropy.py",
        lambda run, _: (
            run.model.vocab_size is not None
            and derived.padded_vocab_size(run.model.vocab_size, run) != run.model.vocab_size
        ),
        "overridden",
        "their logits are the least there is",
        (("megatron_moe/model/loss.py", "class OutputLayer"),),
    ),
)
