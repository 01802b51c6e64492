"""Models of Hugging Face on real ranks: a static cache, and files that one process loads."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import shardwise as sw
from shardwise.fsdp import fully_shard
from shardwise.parallel import plans, shard_module

pytestmark = pytest.mark.needs("transformers")

if importlib.util.find_spec("transformers"):
    from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = torch.arange(20).reshape(4, 5)


def made() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)).eval()


def spread() -> Any:
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    plan = plans.llama(names=plans.HUGGING_FACE, data_axis="dp")
    return shard_module(made(), mesh, plan, strict=False)


def generated(model: Any) -> list[list[int]]:
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    result: Any = model.generate(TOKENS, cache_implementation="static", **how)
    return result.tolist()


def generate_on_ranks() -> list[list[int]]:
    return generated(spread())


@pytest.mark.slow
def test_generation_with_a_static_cache_is_that_of_one_process(workers4):
    assert workers4.run(generate_on_ranks) == [generated(made())] * 4


def save(path: str, kind: str) -> None:
    if kind == "tp":
        model = spread()
    else:
        model = made()
        fully_shard(model, mesh=sw.init_device_mesh("cpu", (4,)))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    assert (state != {}) == (dist.get_rank() == 0)
    model.save_pretrained(path, state_dict=state)  # on all ranks; the first one writes


@pytest.mark.parametrize("kind", ["tp", "fsdp"])
def test_one_process_loads_what_ranks_have_saved(workers4, tmp_path: Path, kind: str):
    workers4.run(save, str(tmp_path), kind)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert type(again).__name__ == again.config.architectures[0] == "LlamaForCausalLM"
    expected = made().state_dict()
    assert list(again.state_dict()) == list(expected)
    for name, value in again.state_dict().items():
        assert torch.equal(value, expected[name]), name
