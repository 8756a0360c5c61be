# NVIDIA's PyTorch image brings a matching set of torch, NCCL, Transformer Engine and apex, which pip cannot.
# 26.05: PyTorch 2.12 (the public grouped_mm needs 2.10) and Python 3.12, hence the newer of the two engines.
FROM nvcr.io/nvidia/pytorch:26.05-py3

WORKDIR /opt/megatron_moe
COPY setup.py pyproject.toml README.md LICENSE ./
COPY megatron_moe megatron_moe
COPY pretrain_moe.py ./
COPY tools tools
COPY tests tests

# The image's own constraints keep its torch, numpy and Transformer Engine; ours would replace them.
RUN pip install --no-cache-dir --editable '.[dev]' \
    && python -c "import transformer_engine.pytorch, megatron_moe"

CMD ["python", "pretrain_moe.py", "--help"]
