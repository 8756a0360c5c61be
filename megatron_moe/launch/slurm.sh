# How the job starts, ends and goes on; `megatron-moe slurm` wrote it. It needs bash, coreutils and Slurm, no container.
#
# Above are RUN (the run's folder), SAVE (its checkpoints), PROCESSES (ranks per node), MAX_RESTARTS, SAVE_SECONDS,
# CPU_BIND, PREFLIGHT (yes or empty), CONTAINER (none, pyxis or apptainer), IMAGE, MOUNTS, FLAGS and PREFLIGHT_FLAGS.

say() { echo "slurm job $SLURM_JOB_ID: $*"; }

# The number of the newest step in $SAVE; 0 without any.
newest_step() {
  local step=0
  [[ -r $SAVE/latest_checkpointed_iteration.txt ]] && read -r step <"$SAVE/latest_checkpointed_iteration.txt"
  if [[ $step =~ ^[0-9]+$ ]]; then echo "$((10#$step))"; else echo 0; fi
}

# State of the budget: how many attempts were made, how many of them in a row left no newer checkpoint, the step that
# the last one went on from, its nodes, how it ended ("running" until it has), and the nodes that failed, one word each time.
read_state() {
  attempt=0 fruitless=0 from=0 nodes='' ended='' failed=''
  local name value
  [[ -r $STATE ]] || return 0
  while IFS='=' read -r name value; do
    case $name in
    attempt | fruitless | from | nodes | ended | failed) printf -v "$name" '%s' "$value" ;;
    esac
  done <"$STATE"
}

write_state() {
  printf '%s\n' "attempt=$attempt" "fruitless=$fruitless" "from=$from" "nodes=$nodes" "ended=$ended" "failed=$failed" \
    >"$STATE.new" && sync "$STATE.new" && mv "$STATE.new" "$STATE"
}

# Count the attempt that has ended: a newer checkpoint makes the budget whole again.
count() {
  if (($(newest_step) > from)); then fruitless=0; else fruitless=$((fruitless + 1)); fi
}

# Without a budget there is no other attempt: say so once. Whoever requeues the job by hand starts with a whole one.
give_up_if_exhausted() {
  ((fruitless > MAX_RESTARTS)) || return 0
  say "gives up: $fruitless attempts in a row left no newer checkpoint in $SAVE (--max-restarts $MAX_RESTARTS); the last: $ended"
  fruitless=0
  write_state
  exit 1
}

# The command of the package on every node: in the container, or where an environment with it and torch is found.
find_program() {
  local python
  case $CONTAINER in
  pyxis) PROGRAM=(megatron-moe) TORCHRUN=(torchrun) IN_CONTAINER=() && return ;;
  apptainer)
    PROGRAM=(megatron-moe) TORCHRUN=(torchrun)
    IN_CONTAINER=(apptainer exec --bind "$PWD${MOUNTS:+,$MOUNTS}" --pwd "$PWD" "$IMAGE")
    [[ ${SLURM_GPUS_ON_NODE:-0} != 0 ]] && IN_CONTAINER=("${IN_CONTAINER[@]:0:2}" --nv "${IN_CONTAINER[@]:2}")
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
  local container=()
  [[ $CONTAINER == pyxis ]] && container=(--container-image "$IMAGE" --container-workdir "$PWD"
    --container-mounts "$PWD${MOUNTS:+,$MOUNTS}")
  rm -f "$STATUSES".*
  # srun does not inherit --cpus-per-task since Slurm 22.05: all ranks of a node would share one core. When one node has
  # ended, the others get as long as a checkpoint takes.
  srun --nodes "$SLURM_JOB_NUM_NODES" --ntasks "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task "$SLURM_CPUS_PER_TASK"} ${CPU_BIND:+--cpu-bind "$CPU_BIND"} \
    --kill-on-bad-exit=0 --wait "$SAVE_SECONDS" "${container[@]}" \
    bash -c "$PER_NODE" bash "$STATUSES" "${IN_CONTAINER[@]}" "$@" &
  srun_pid=$!
  status=0
  wait "$srun_pid" || status=$?
  # A trapped signal ends `wait` early, with the ranks still at work.
  while kill -0 "$srun_pid" 2>/dev/null; do
    status=0
    wait "$srun_pid" || status=$?
  done
  srun_pid=''
}

# Slurm's USR1 before the limit: the ranks save and end. During the start there may be no step yet, or ranks that do not
# listen: then they are asked again.
time_is_up() {
  time_up=yes
  say "time is almost up: the ranks are asked to save and end"
  ask_to_end &
}

ask_to_end() {
  trap - USR1 TERM
  while :; do
    scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null
    sleep 10
  done
}

# The nodes on which a signal ended a rank, as a kill or a crash does, and not as a consequence of another one's end.
killed_nodes() {
  local file code
  for file in "$STATUSES".*; do
    [[ -r $file ]] || continue
    read -r code <"$file"
    if ((code > 128 && code != 130 && code != 143)); then echo "${file##*.status.}"; fi
  done
}

# Those that failed twice, with commas.
failed_twice() { tr ' ' '\n' <<<"$failed" | sort | uniq -d | paste -sd, -; }

requeue() {
  local bad left
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
    left=$(sinfo -h -N -p "$SLURM_JOB_PARTITION" -t idle,alloc,mix,comp -o %N | sort -u | grep -cvxF "${bad//,/$'\n'}")
    if ((left < SLURM_JOB_NUM_NODES)); then
      say "would leave out $bad, which failed twice, but only $left other nodes of $SLURM_JOB_PARTITION are up, of $SLURM_JOB_NUM_NODES needed"
    elif scontrol update "jobid=$SLURM_JOB_ID" "excnodelist=$bad${EXCLUDE:+,$EXCLUDE}"; then
      say "leaves out $bad, which failed twice"
    fi
  fi
  exit 0
}

# What a step of the job came to. Returns where the next one may begin.
after() {
  local what=$1 node
  if [[ $cancelled ]]; then
    ended="Slurm ended it (cancelled, preempted or requeued), newest checkpoint at step $(newest_step)"
    write_state
    exit "$((status ? status : 143))"
  fi
  if ((status == 2)); then
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
  for node in $(killed_nodes); do failed="${failed:+$failed }$node"; done
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
  trap 'jobs -p | xargs -r kill 2>/dev/null' EXIT
  find_program
  read_state
  if [[ $ended == running ]]; then
    ended='without a word: a node was lost, or Slurm killed it'
    for node in $nodes; do
      sinfo -h -N -n "$node" -t down,fail -o %N | grep -q . && failed="${failed:+$failed }$node"
    done
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
  local first=${nodes%% *} port=$((20000 + SLURM_JOB_ID % 10000)) address
  address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  local meet=(--nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$PROCESSES" --rdzv-backend c10d
    --rdzv-endpoint "${address:-$first}:$port" --rdzv-id "$SLURM_JOB_ID-$attempt" --rdzv-conf "is_host=@IS_HOST@")
  if [[ $PREFLIGHT ]]; then
    on_every_node "${TORCHRUN[@]}" "${meet[@]}" -m megatron_moe preflight "${PREFLIGHT_FLAGS[@]}"
    after 'the preflight'
  fi
  on_every_node "${PROGRAM[@]}" train "${meet[@]}" "${FLAGS[@]}"
  after 'the training'
  ended='done'
  write_state
  say 'is done'
}

main
