"""What other code may do with a DTensor, on four real ranks."""

from support.other_code import failures_on_real_ranks

import shardwise as sw


def test_every_call_is_right_or_refused_on_real_ranks(workers4: sw.Workers) -> None:
    wrong = workers4.run(failures_on_real_ranks)
    assert wrong == [[]] * 4, "\n".join(line for lines in wrong for line in lines)
