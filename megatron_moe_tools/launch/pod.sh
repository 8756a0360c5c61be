# How a pod of Kubernetes, or a node of SkyPilot, starts, ends and goes on; `megatron-moe` wrote it. It needs bash and
# coreutils.
#
# Above are JOB (a name for files), INDEX (of this pod), NODES, MEET (the first pod's host), PORT, FIRST (not empty when
# the job has just been submitted), RUN (the run's folder, which all pods share), SAVE (its checkpoints), PROCESSES (ranks
# per pod), MAX_RESTARTS, NUMA_BINDING, PREFLIGHT (yes or empty), EXHAUSTED and AGAIN (exit statuses), PREFLIGHT_FLAGS (the
# preflight's own), FLAGS (the training's), and the functions of the budget, which the first pod keeps.

say() { echo "$JOB, node $INDEX: $*"; }

# End this pod, and let the others know how.
leave() {
  echo "$1" >"$STATUSES.$INDEX"
  exit "$1"
}

# The job fails. If it is started again all the same, because another pod ended first, the state still says so.
give_up_if_exhausted() {
  is_exhausted || return 0
  write_state
  leave "$EXHAUSTED"
}

# SIGTERM: the ranks save and end.
# shellcheck disable=SC2317 # by a trap
asked_to_end() {
  asked=yes
  say "asked to end: the ranks save"
  [[ $child ]] && kill -TERM "$child" 2>/dev/null
}

# Run a command to its end, also when a trapped signal ends `wait` early.
run() {
  status=0
  [[ $asked ]] && return
  "$@" &
  child=$!
  [[ $asked ]] && kill -TERM "$child" # which came before there was a child
  wait "$child" || status=$?
  while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
  done
  child=''
}

# How the other pods of this attempt ended, as far as they have within 10 s, a word each.
others() {
  local file code left=10 found=''
  while ((left-- > 0)); do
    found=''
    for file in "$STATUSES".*; do
      code=''
      [[ $file != "$STATUSES.$INDEX" && -r $file ]] && read -r code <"$file"
      found+="${code:+ $code}"
    done
    # shellcheck disable=SC2086 # a word each
    set -- $found
    (($# >= NODES - 1)) && break
    sleep 1
  done
  echo "$found "
}

# The attempt has ended, without a mistake. The first pod counts it.
start_again() {
  ended=$1
  say "is to be started again: $ended"
  if ((INDEX == 0)); then
    count
    give_up_if_exhausted
    write_state
  fi
  leave "$AGAIN"
}

# What a step of the job came to. Returns where the next one may begin, or the job is done.
after() {
  local what=$1 last=$2 how code=$status seen
  [[ $asked ]] && start_again "asked to end (deleted, preempted, or another node failed), newest checkpoint at step $(newest_step)"
  ((status == 0)) && [[ ! $last ]] && return
  how="$what ended with status $status"
  ((status == 0 || status == 2)) || code=$AGAIN
  echo "$code" >"$STATUSES.$INDEX"
  seen=$(others)
  if ((status == 2)) || [[ $seen == *' 2 '* ]]; then
    ended="a mistake, $what"
    ((INDEX == 0)) && write_state
    say "is not started again: $what ended with status 2, a mistake in its flags, files or settings, which the log names above"
    leave 2
  fi
  ((status == 0)) || start_again "$how"
  # A node that was asked to end lets all of them save and end with 0.
  [[ $seen == *" $AGAIN "* ]] && start_again "another node was asked to end, newest checkpoint at step $(newest_step)"
  return 0
}

begin() {
  [[ $FIRST ]] && rm -f "$STATE"
  read_state
  case $ended in
  running)
    ended='without a word: a node was lost or killed'
    count
    ;;
  done) count ;; # on this node, but not on another
  esac
  give_up_if_exhausted
  attempt=$((attempt + 1))
  from=$(newest_step)
  say "attempt $attempt on $NODES nodes${ended:+; the last one: $ended}; $( ((from)) && echo "goes on from step $from" || echo "no checkpoint yet")"
  ended=running
  if ! write_state; then
    say "error: cannot write $STATE; --save has to lie in a folder that all nodes share and may write"
    leave 2
  fi
}

main() {
  child='' asked='' status=0
  STATE=$RUN/$JOB.state STATUSES=$RUN/$JOB.status
  trap asked_to_end TERM
  if ! mkdir -p "$RUN" || ! rm -f "$STATUSES.$INDEX"; then
    say "error: cannot write $RUN; --save has to lie in a folder that all nodes share and may write"
    exit 2
  fi
  if ! command -v megatron-moe >/dev/null || ! command -v torchrun >/dev/null; then
    say "error: megatron-moe and torchrun are not on PATH; install the package in --image"
    leave 2
  fi
  local host=false
  if ((INDEX == 0)); then
    host=true
    begin
  fi
  # Images are pulled at different speeds: the others wait ten minutes for the first one's store.
  local meet=(--nnodes "$NODES" --nproc-per-node "$PROCESSES" --rdzv-backend c10d --rdzv-endpoint "$MEET:$PORT"
    --rdzv-id "$JOB" --rdzv-conf "is_host=$host,read_timeout=600")
  if [[ $PREFLIGHT ]]; then
    run torchrun "${meet[@]}" -m megatron_moe preflight "${PREFLIGHT_FLAGS[@]}" "${FLAGS[@]}"
    after 'the preflight' ''
  fi
  run megatron-moe train "${meet[@]}" ${NUMA_BINDING:+--numa-binding "$NUMA_BINDING"} "${FLAGS[@]}"
  after 'the training' last
  ended='done'
  ((INDEX == 0)) && write_state
  say 'is done'
  leave 0
}

main
