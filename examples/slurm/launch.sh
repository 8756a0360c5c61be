# Sourced by the .sbatch files beside it, which say how many nodes and which flags; this says how they start and stop.
#
#   launch PROCESSES_PER_NODE FLAGS...   one torchrun per node, PROCESSES_PER_NODE ranks each
#   PROGRAM=tools/preflight.py sbatch ...   the same nodes, ranks and flags, for a check of a minute instead of a run
#   CONTAINER=image.sqsh CONTAINER_MOUNTS=/data,/checkpoints sbatch ...   in a container, by pyxis
#
# Before the time limit Slurm sends USR1 to the batch script (#SBATCH --signal=B:USR1@SECONDS). It passes SIGTERM on to
# the ranks, which save at the end of their step (--exit-signal-handler), and puts the job back into the queue, where it
# goes on from that checkpoint (--load). At a preemption Slurm sends SIGTERM itself and requeues itself.

launch() {
  local processes=$1
  shift
  cd "$SLURM_SUBMIT_DIR"
  local hosts address port time_is_up='' status=0 srun_pid
  mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  # The first node's address as Slurm knows it; its name may mean nothing outside Slurm.
  address=$(scontrol show node "${hosts[0]}" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  # Two jobs whose first node is the same need different ports.
  port=$((20000 + SLURM_JOB_ID % 20000))

  local container=()
  if [[ ${CONTAINER:-} ]]; then
    container=(--container-image "$CONTAINER" --container-workdir "$SLURM_SUBMIT_DIR"
      --container-mounts "$SLURM_SUBMIT_DIR${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
  fi

  trap 'time_is_up=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
  # When one node's torchrun has ended, in whichever way, the others get as long as a checkpoint takes.
  # srun does not inherit --cpus-per-task since Slurm 22.05: all ranks of a node would share one core.
  srun --ntasks-per-node 1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task "$SLURM_CPUS_PER_TASK"} \
    --kill-on-bad-exit=0 --wait "${SAVE_SECONDS:-300}" "${container[@]}" \
    torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$processes" \
    --rdzv-backend c10d --rdzv-endpoint "${address:-${hosts[0]}}:$port" --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --shutdown-timeout "${SAVE_SECONDS:-300}" \
    "${PROGRAM:-pretrain_moe.py}" "$@" &
  srun_pid=$!

  wait "$srun_pid" || status=$?
  # A trapped signal ends `wait` early, with the ranks still at work.
  while kill -0 "$srun_pid" 2>/dev/null; do
    status=0
    wait "$srun_pid" || status=$?
  done
  if [[ $time_is_up && $status -ne 0 ]]; then
    echo "time is up: requeueing job $SLURM_JOB_ID"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  return "$status"
}
