# How the job starts, ends and goes on; `megatron-moe slurm` wrote it. It needs bash, coreutils and Slurm on the nodes.
#
# Above are RUN (the run's folder), SAVE (its checkpoints), PROCESSES (ranks per node), MAX_RESTARTS, SAVE_SECONDS,
# CPU_BIND, NUMA_BINDING, PREFLIGHT (yes or empty), CONTAINER (empty, pyxis or apptainer), IMAGE, MOUNTS, EXCLUDE,
# PREFLIGHT_FLAGS (the preflight's own), FLAGS (the training's), and the functions of the budget.

say() { echo "slurm job $SLURM_JOB_ID: $*"; }

# Whoever requeues the job by hand starts with a whole budget.
give_up_if_exhausted() {
  is_exhausted || return 0
  fruitless=0
  write_state
  exit 1
}

# The folders of the host that a container needs, with commas.
mounts() {
  local folders=$PWD
  [[ $RUN == /* ]] && folders+=,$RUN
  echo "$folders${MOUNTS:+,$MOUNTS}"
}

# The command of the package on every node: in the container, or where an environment with it and torch is found.
find_program() {
  local python
  case $CONTAINER in
  pyxis) PROGRAM=(megatron-moe) TORCHRUN=(torchrun) IN_CONTAINER=() && return ;;
  apptainer)
    PROGRAM=(megatron-moe) TORCHRUN=(torchrun)
    IN_CONTAINER=(apptainer exec)
    [[ -e /dev/nvidiactl ]] && IN_CONTAINER+=(--nv)
    IN_CONTAINER+=(--bind "$(mounts)" --pwd "$PWD" "$IMAGE")
    return
    ;;
  esac
  IN_CONTAINER=()
  for python in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}" .venv/bin/python; do
    if [[ -x $python ]] && "$python" -c "$HAS_BOTH" 2>/dev/null; then
      PROGRAM=("$python" -m megatron_moe) TORCHRUN=("$python" -m torch.distributed.run)
      return
    fi
  done
  if command -v megatron-moe >/dev/null; then
    PROGRAM=(megatron-moe) TORCHRUN=(torchrun)
    return
  fi
  say "error: no environment with megatron_moe and torch: neither an active one, nor $PWD/.venv, nor megatron-moe on PATH;" \
    "run \`make setup\` in a clone, or activate the environment, before sbatch"
  exit 2
}
HAS_BOTH='import sys, importlib.util as u; sys.exit(not (u.find_spec("megatron_moe") and u.find_spec("torch")))'

# Run a command on each node, which writes its status down: srun has the largest one, without the node. Slurm signals all
# processes of a step, and this shell has to outlive its command.
PER_NODE='trap : TERM USR1 INT
statuses=$1; shift
[[ $SLURM_NODEID == 0 ]] && host=true || host=false
words=(); for word in "$@"; do words+=("${word//@IS_HOST@/$host}"); done
"${words[@]}"; status=$?
echo "$status" >"$statuses.$SLURMD_NODENAME"
exit "$status"'

on_every_node() {
  local container=() watcher
  status=0
  [[ $time_up || $cancelled ]] && return
  [[ $CONTAINER == pyxis ]] && container=(--container-image "$IMAGE" --container-workdir "$PWD"
    --container-mounts "$(mounts)")
  rm -f "$STATUSES".*
  # srun does not inherit --cpus-per-task since Slurm 22.05: all ranks of a node would share one core. When one node has
  # ended, the others get as long as a checkpoint takes.
  srun --nodes "$SLURM_JOB_NUM_NODES" --ntasks "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task "$SLURM_CPUS_PER_TASK"} ${CPU_BIND:+--cpu-bind "$CPU_BIND"} \
    --kill-on-bad-exit=0 --wait "$SAVE_SECONDS" "${container[@]}" \
    bash -c "$PER_NODE" bash "$STATUSES" "${IN_CONTAINER[@]}" "$@" &
  srun_pid=$!
  end_the_others &
  watcher=$!
  wait "$srun_pid" || status=$?
  # A trapped signal ends `wait` early, with the ranks still at work.
  while kill -0 "$srun_pid" 2>/dev/null; do
    status=0
    wait "$srun_pid" || status=$?
  done
  srun_pid=''
  kill "$watcher" 2>/dev/null
}

# Whether the job's script is still there for a background loop: the next attempt's ranks are not to be signalled.
is_of_this_attempt() { kill -0 $$ 2>/dev/null; }

# When one node has failed, the others notice that by themselves once they train, and their watchdogs say why. Those that
# wait for it at the start would for long, and keep a SIGTERM until then: SIGINT ends them at once.
end_the_others() {
  local file code
  while sleep 1 && is_of_this_attempt; do
    for file in "$STATUSES".*; do
      code=0
      [[ -r $file ]] && read -r code <"$file"
      ((code == 0 || code == 138 || code == 143)) && continue # these two were asked to end, as all are then
      sleep 10
      is_of_this_attempt || return
      say "${file##*.status.} ended with status $code; the other nodes are ended"
      scancel --signal=INT "$SLURM_JOB_ID"
      return
    done
  done
}

# Slurm's USR1 before the limit: the ranks save and end.
time_is_up() {
  time_up=yes
  say "time is almost up: the ranks are asked to save and end"
  ask_to_end &
}

# Ranks that still start may not have listened, and are asked again. Those that have not ended when a checkpoint would be
# written are given up, so that there is time to requeue the job, which ends them.
ask_to_end() {
  local deadline=$((SECONDS + SAVE_SECONDS + 30))
  trap - USR1 TERM
  while ((SECONDS < deadline)); do
    is_of_this_attempt || return
    scancel --signal=USR1 "$SLURM_JOB_ID" 2>/dev/null
    sleep 5
  done
  say "the ranks have not ended within $((SAVE_SECONDS + 30)) s (--save-seconds $SAVE_SECONDS)"
  kill -KILL "$srun_pid"
}

# The nodes on which a signal ended a rank: a kill or a crash, but neither a request to end nor SIGABRT, which libraries
# raise where another node is gone.
killed_nodes() {
  local file code
  for file in "$STATUSES".*; do
    [[ -r $file ]] || continue
    read -r code <"$file"
    if ((code > 128 && code != 130 && code != 134 && code != 138 && code != 143)); then echo "${file##*.status.}"; fi
  done
}

# The nodes of the last attempt that Slurm says are down.
down_nodes() {
  local node
  for node in $nodes; do
    if [[ $(sinfo -h -N -n "$node" -t down,fail -o %N) ]]; then echo "$node"; fi
  done
}

blame() {
  local node
  for node in "$@"; do failed="${failed:+$failed }$node"; done
}

# Those that failed twice, with commas.
failed_twice() {
  local node seen='' twice=''
  for node in $failed; do
    if [[ " $seen " == *" $node "* && ",$twice," != *",$node,"* ]]; then twice+=${twice:+,}$node; fi
    seen+=" $node"
  done
  echo "$twice"
}

# How many nodes of the partition are up that are not among these, which are written with commas.
others_up() {
  local node seen=' ' count=0
  for node in $(sinfo -h -N -p "$SLURM_JOB_PARTITION" -t idle,alloc,mix,comp -o %N); do
    if [[ ",$1," != *",$node,"* && $seen != *" $node "* ]]; then count=$((count + 1)); fi
    seen+="$node "
  done
  echo "$count"
}

requeue() {
  local bad without left
  write_state
  say "goes back into the queue: $ended"
  # Only a pending job can be told nodes to leave out. Slurm ends this script after KillWait: the trap leaves it that time.
  trap '' TERM
  if ! scontrol requeue "$SLURM_JOB_ID"; then
    say "error: Slurm does not requeue it (#SBATCH --requeue, JobRequeue); submit it again, it goes on from $SAVE"
    exit 1
  fi
  bad=$(failed_twice)
  if [[ $bad ]]; then
    without=$bad
    [[ $EXCLUDE ]] && without+=,$(scontrol show hostnames "$EXCLUDE" | paste -sd, -)
    left=$(others_up "$without")
    if ((left < SLURM_JOB_NUM_NODES)); then
      say "would leave out $bad, which failed twice, but only $left other nodes of $SLURM_JOB_PARTITION are up, of $SLURM_JOB_NUM_NODES needed"
    elif scontrol update "jobid=$SLURM_JOB_ID" "excnodelist=$without"; then
      say "leaves out $bad, which failed twice"
    fi
  fi
  exit 0
}

# Whether a node has ended with the status of a mistake in flags or files; the others then end in some other way.
is_a_mistake() {
  local file code
  for file in "$STATUSES".*; do
    [[ -r $file ]] && read -r code <"$file" && ((code == 2)) && return
  done
  return 1
}

# What a step of the job came to. Returns where the next one may begin.
after() {
  local what=$1
  if [[ $cancelled ]]; then
    # shellcheck disable=SC2046 # a word each
    blame $(down_nodes)
    ended="Slurm ended it (cancelled, preempted, requeued or without a node), newest checkpoint at step $(newest_step)"
    write_state
    exit "$((status ? status : 143))"
  fi
  if is_a_mistake; then
    ended="a mistake, $what"
    write_state
    say "is not requeued: $what ended with status 2, a mistake in its flags, files or settings, which the log names above"
    exit 2
  fi
  if [[ $time_up ]]; then
    ended="its time was up, newest checkpoint at step $(newest_step)"
    count
    give_up_if_exhausted
    requeue
  fi
  ((status == 0)) && return
  # shellcheck disable=SC2046
  blame $(killed_nodes)
  ended="$what ended with status $status${failed:+, nodes that failed so far: $failed}"
  count
  give_up_if_exhausted
  requeue
}

main() {
  cd "$SLURM_SUBMIT_DIR" || exit 1
  mkdir -p "$RUN" || exit 1
  STATE=$RUN/slurm-$SLURM_JOB_ID.state STATUSES=$RUN/slurm-$SLURM_JOB_ID.status
  time_up='' cancelled='' srun_pid='' status=0
  trap time_is_up USR1
  trap 'cancelled=yes' TERM
  # The background loop that asks ranks to end goes with this script.
  trap 'for job in $(jobs -p); do kill "$job" 2>/dev/null; done' EXIT
  find_program
  read_state
  if [[ $ended == running ]]; then
    ended='without a word: a node was lost, or Slurm killed it'
    # shellcheck disable=SC2046
    blame $(down_nodes)
  fi
  case $ended in 'without a word'* | 'Slurm ended it'*)
    count
    give_up_if_exhausted
    ;;
  esac
  attempt=$((attempt + 1))
  from=$(newest_step)
  say "attempt $attempt on $SLURM_JOB_NODELIST${ended:+; the last one: $ended}; $( ((from)) && echo "goes on from step $from" || echo "no checkpoint yet")"
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd' ' -)
  ended=running
  write_state
  # The first node's address as Slurm knows it, for its name may mean nothing outside Slurm; and a port for each job.
  local first=${nodes%% *} port=$((20000 + SLURM_JOB_ID % 10000)) address=''
  [[ $(scontrol show node "$first") =~ NodeAddr=([^[:space:]]+) ]] && address=${BASH_REMATCH[1]}
  local meet=(--nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$PROCESSES" --rdzv-backend c10d
    --rdzv-endpoint "${address:-$first}:$port" --rdzv-id "$SLURM_JOB_ID-$attempt" --rdzv-conf "is_host=@IS_HOST@")
  if [[ $PREFLIGHT ]]; then
    on_every_node "${TORCHRUN[@]}" "${meet[@]}" -m megatron_moe preflight "${PREFLIGHT_FLAGS[@]}" "${FLAGS[@]}"
    after 'the preflight'
  fi
  on_every_node "${PROGRAM[@]}" train "${meet[@]}" ${NUMA_BINDING:+--numa-binding "$NUMA_BINDING"} "${FLAGS[@]}"
  after 'the training'
  ended='done'
  write_state
  say 'is done'
}

main
