"""The batch size is a function of the samples consumed, so a resumed ramp goes on where it was."""

from megatron_moe.training.batch_size import BatchSchedule


def test_a_ramp_grows_in_equal_shares_of_its_samples():
    schedule = BatchSchedule(micro_batch_size=2, data_parallel_size=2, final=16, ramp=(4, 4, 300))
    # three increments over 300 samples: one every 100
    sizes = {n: schedule.global_batch_size(n) for n in (0, 99, 100, 199, 200, 299, 300, 10**9)}
    assert sizes == {0: 4, 99: 4, 100: 8, 199: 8, 200: 12, 299: 12, 300: 16, 10**9: 16}
    assert [schedule.num_micro_batches(n) for n in (0, 100, 300)] == [1, 2, 4]


def test_samples_of_a_ramped_run_are_the_sum_of_its_steps():
    schedule = BatchSchedule(1, 1, 12, (2, 2, 57))
    consumed = 0
    for iterations in range(1, 40):
        consumed += schedule.global_batch_size(consumed)
        assert schedule.samples_after(iterations) == consumed
        assert schedule.samples_after(iterations - 3, 6) == consumed or iterations < 3  # three steps of 2 each
        assert schedule.steps_to(consumed) == iterations == schedule.steps_to(consumed + 1)
        assert schedule.steps_to(consumed - 1) == iterations - 1


def test_steps_are_counted_from_where_a_run_with_other_batches_has_come() -> None:
    steps = [BatchSchedule(1, 1, 8).steps_to(160, consumed) for consumed in (0, 40, 41, 153, 160, 170)]
    assert steps == [20, 15, 14, 0, 0, 0]
