# For GPUs. NVIDIA's PyTorch image brings a matching set of torch, NCCL, Transformer Engine and apex, which pip cannot.
# 26.05: PyTorch 2.12 (the public grouped_mm needs 2.10) and Python 3.12, hence the newer of the two engines.
# It was not built or run by us: no GPU was at hand. A CPU's is Dockerfile.cpu.
#
#   docker build --tag megatron_moe .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 \
#     --volume /data:/data --volume /checkpoints:/checkpoints megatron_moe \
#     torchrun --standalone --nproc-per-node 8 -m megatron_moe preflight --preset qwen3-30b-a3b --save /checkpoints/run
#
# NCCL's ranks meet in shared memory, of which a container has 64 MB without --ipc=host, and lock memory for the network.
# On Slurm with enroot and pyxis, which share both with the host:
#
#   enroot import --output megatron_moe.sqsh dockerd://megatron_moe
#   megatron-moe slurm --container pyxis --image megatron_moe.sqsh --mounts /data /checkpoints ...    # docs/guides/slurm_jobs.md
FROM nvcr.io/nvidia/pytorch:26.05-py3

WORKDIR /opt/megatron_moe
COPY setup.py pyproject.toml README.md CONTRIBUTING.md CHANGELOG.md LICENSE Makefile pretrain_moe.py ./
COPY constraints constraints
COPY docker docker
COPY megatron_moe megatron_moe
COPY megatron_moe_tools megatron_moe_tools
COPY tools tools
COPY examples examples
COPY benchmarks benchmarks
COPY docs docs
COPY tests tests

# The image's own constraints keep its torch, numpy and Transformer Engine; ours would replace them. The last step ends
# the build if pip has replaced or removed one of them nevertheless.
RUN python docker/image_libraries.py record before.json \
    && pip install --no-cache-dir --no-build-isolation --editable '.[hf,data]' \
    && python docker/image_libraries.py compare before.json \
    && rm before.json \
    && python -c "import megatron_moe"

# Checkpoints and logs of a container belong to this user on the host: docker run --user "$(id -u)" for another.
RUN useradd --create-home --shell /bin/bash moe && chown --recursive moe /opt/megatron_moe
USER moe

CMD ["python", "pretrain_moe.py", "--help"]
