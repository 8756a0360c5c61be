# The budget of attempts, which is kept in $STATE. Above are SAVE (the checkpoints) and MAX_RESTARTS; what follows has
# say, which prints a line of the job's.

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

# Whether there is to be no other attempt; it says why.
is_exhausted() {
  ((fruitless > MAX_RESTARTS)) || return 1
  say "gives up: $fruitless attempts in a row left no newer checkpoint in $SAVE (--max-restarts $MAX_RESTARTS); the last: $ended"
}

