"""What tests/test_fsdp_training.py shows in double precision, in single. For `make sweep`."""

import pytest
import torch
from fsdp_models import FEATURES, WAYS, Task, check


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("feature", FEATURES)
def test_ten_steps_are_those_of_one_process(way, feature):
    fields, variation = FEATURES[feature]
    check(WAYS[way], Task(torch.float32, **fields), variation)
