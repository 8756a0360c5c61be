"""What becomes of a Megatron-LM command here: answers for flags and shell scripts, and the command rewritten."""
