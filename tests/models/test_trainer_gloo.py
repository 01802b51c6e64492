"""shardwise.hugging_face.Trainer: sharded models train, evaluate, save and resume."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.fsdp import fully_shard
from shardwise.parallel import plans, shard_module

pytestmark = [pytest.mark.needs("transformers"), pytest.mark.needs("accelerate")]


@pytest.fixture(scope="module")
def workers2() -> Iterator[sw.Workers]:
    workers = sw.Workers(2, timeout=180)
    yield workers
    workers.close()


class Tokens(torch.utils.data.Dataset):
    """Rows of tokens."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(32, (rows, 6), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[at], "labels": self.tokens[at]}


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        yield from Tokens(8)


def build() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


def sharded(kind: str) -> Any:
    model, world = build(), dist.get_world_size()
    if kind == "plan":
        mesh = sw.init_device_mesh("cpu", (world,), ("tp",))
        shard_module(model, mesh, plans.llama(names=plans.HUGGING_FACE), strict=False)
    elif kind == "plan with a data axis":
        mesh = sw.init_device_mesh("cpu", (world,), ("dp",))
        plan = plans.llama(names=plans.HUGGING_FACE, data_axis="dp")
        shard_module(model, mesh, plan, strict=False)
    elif kind == "fully_shard":
        mesh = sw.init_device_mesh("cpu", (world,), ("dp",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "both":
        mesh = sw.init_device_mesh("cpu", (2, world // 2), ("dp", "tp"))
        plan = plans.llama(names=plans.HUGGING_FACE)
        shard_module(model, mesh["tp"], plan, strict=False)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def trainer(kind: Any, model: Any, folder: str, rows: int, **options: Any) -> Any:
    from accelerate.state import AcceleratorState
    from transformers import TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)  # of the test before
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        max_steps=4,
        learning_rate=0.01,
        max_grad_norm=0.5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        seed=3,
        **{"save_strategy": "steps", "save_steps": 2} | options,
    )
    return kind(
        model,
        arguments,
        train_dataset=Tokens(32),
        eval_dataset=Tokens(16),
        compute_metrics=lambda found: {
            "right": int((found.predictions.argmax(-1) == found.label_ids).sum()),
            "rows": len(found.label_ids),
        },
    )


def results(made: Any, resume: str | None = None) -> dict[str, Any]:
    made.train(resume_from_checkpoint=resume)
    steps = [each for each in made.state.log_history if "loss" in each]
    found = {"losses": [each["loss"] for each in steps]}
    found["norms"] = [float(each["grad_norm"]) for each in steps]
    for rows in (16, 10):  # the last of the batches of 10 is short
        evaluated = made.evaluate(Tokens(rows))
        found |= {f"{each} of {rows}": evaluated[f"eval_{each}"] for each in ("right", "rows")}
        found[f"loss of {rows}"] = evaluated["eval_loss"]
    return found


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: (each.full_tensor() if isinstance(each, sw.DTensor) else each).detach().clone()
        for name, each in model.state_dict().items()
    }


def on_a_rank(kind: str, folder: str) -> Any:
    from shardwise.hugging_face import Trainer

    rows = 8 if kind.startswith("plan") else 8 // dist.get_world_size()
    model = sharded(kind)
    found = results(trainer(Trainer, model, folder, rows))
    resumed = sharded(kind)
    again = results(trainer(Trainer, resumed, folder + "-resumed", rows), f"{folder}/checkpoint-2")
    return found, weights(model), again, weights(resumed)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import Trainer

    model = build()
    folder = str(tmp_path_factory.mktemp("alone"))
    return results(trainer(Trainer, model, folder, 8)), weights(model), folder


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", ["plan", "plan with a data axis", "fully_shard"])
def test_a_sharded_model_trains_evaluates_saves_and_resumes_as_in_one_process(
    kind: str, alone: Any, workers2: sw.Workers, tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    expected, final, _ = alone
    folder = str(tmp_path / "out")
    for found, trained, again, resumed in workers2.run(on_a_rank, kind, folder):
        for name, value in expected.items():
            if name == "loss of 10" and kind == "fully_shard":
                continue  # a mean of ranks with different numbers of rows, as with DDP
            assert found[name] == pytest.approx(value, rel=1e-4), name
        assert again["losses"][-2:] == pytest.approx(expected["losses"][-2:], rel=1e-4)
        for name, value in final.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(resumed[name], value, rtol=1e-3, atol=1e-5)
    loaded = LlamaForCausalLM.from_pretrained(f"{folder}/checkpoint-4").state_dict()
    for name, value in final.items():
        torch.testing.assert_close(loaded[name], value, rtol=1e-3, atol=1e-5)


# A checkpoint holds whole tensors: it fits any number of ranks and any plan.


def resumed(kind: str, rows: int, folder: str, checkpoint: str | None) -> Any:
    from shardwise.hugging_face import Trainer

    model = sharded(kind)
    made = trainer(Trainer, model, folder, rows)
    made.train(resume_from_checkpoint=checkpoint)
    return made.state.global_step, weights(model)


@pytest.mark.slow
def test_a_checkpoint_of_one_process_resumes_on_ranks(
    alone: Any, workers2: sw.Workers, tmp_path: Path
) -> None:
    _, final, folder = alone
    for kind, rows in (("plan", 8), ("fully_shard", 4)):
        run = workers2.run(resumed, kind, rows, str(tmp_path / kind), f"{folder}/checkpoint-2")
        for steps, trained in run:
            assert steps == 4
            for name, value in final.items():
                torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_ranks_resumes_in_one_process(
    alone: Any, workers2: sw.Workers, tmp_path: Path
) -> None:
    from transformers import Trainer

    _, final, _ = alone
    folder = str(tmp_path / "out")
    workers2.run(resumed, "fully_shard", 4, folder, None)
    model = build()
    trainer(Trainer, model, str(tmp_path / "alone"), 8).train(
        resume_from_checkpoint=f"{folder}/checkpoint-2"
    )
    for name, value in weights(model).items():
        torch.testing.assert_close(value, final[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_fully_shard_over_dp_beside_a_plan_over_tp_trains_as_one_process_and_resumes(
    alone: Any, tmp_path: Path
) -> None:
    _, final, folder = alone
    with sw.Workers(4, timeout=180) as workers:
        whole = workers.run(resumed, "both", 4, str(tmp_path / "out"), None)
        rest = workers.run(resumed, "both", 4, str(tmp_path / "rest"), f"{folder}/checkpoint-2")
    for steps, trained in [*whole, *rest]:
        assert steps == 4
        for name, value in final.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-5)


def random_states(folder: str) -> None:
    from shardwise.hugging_face import Trainer

    made = trainer(Trainer, sharded("plan"), folder, 8)
    made._load_rng_state(f"{folder}/checkpoint-2")
    sw.check_random_state(made.model.lm_head.weight.device_mesh)


@pytest.mark.slow
def test_ranks_agree_on_random_numbers_after_a_checkpoint_of_fewer_ranks(
    workers2: sw.Workers, tmp_path: Path
) -> None:
    state = {"python": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002
    state["cpu"] = torch.Generator().manual_seed(7).get_state()
    (tmp_path / "checkpoint-2").mkdir()
    torch.save(state, tmp_path / "checkpoint-2" / "rng_state_0.pth")
    workers2.run(random_states, str(tmp_path))


def loop_with_accelerate(kind: str | None, rows: int) -> Any:
    """A loop in which accelerate prepares the data loader and the optimizer, not the model."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model = build() if kind is None else sharded(kind)
    loader = torch.utils.data.DataLoader(Tokens(16), batch_size=rows)
    optimizer, loader = accelerator.prepare(torch.optim.AdamW(model.parameters(), 0.01), loader)
    norms = []
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch).loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return norms, weights(model)


@pytest.mark.slow
def test_a_loop_with_accelerate_that_does_not_prepare_the_model_is_right_for_fully_shard(
    workers2: sw.Workers,
) -> None:
    norms, final = loop_with_accelerate(None, 8)
    for found, trained in workers2.run(loop_with_accelerate, "fully_shard", 4):
        assert found == pytest.approx(norms, rel=1e-4)
        for name, value in final.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-5)


def refused(kind: str, folder: str) -> str:
    from transformers import Trainer

    model = sharded(kind)
    before = [each.to_local().clone() for each in model.parameters()]
    with pytest.raises(sw.DispatchError) as error:
        trainer(Trainer, model, folder, 8).train()
    for each, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(each.to_local(), value)
    return str(error.value)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", ["plan", "fully_shard"])
def test_the_original_refuses_a_sharded_model_before_it_changes_it(
    kind: str, workers2: sw.Workers, tmp_path: Path
) -> None:
    for error in workers2.run(refused, kind, str(tmp_path)):
        assert "use shardwise.hugging_face.Trainer" in error


def errors(folder: str) -> list[str]:
    from shardwise.hugging_face import Trainer, TrainerError

    found = []
    with pytest.raises(TrainerError) as error:
        trainer(Trainer, build(), folder, 8)
    found.append(str(error.value))
    made = trainer(Trainer, sharded("plan"), folder, 8)
    made.train_dataset = Endless()
    with pytest.raises(TrainerError) as error:
        made.get_train_dataloader()
    found.append(str(error.value))
    return found


def test_plain_models_and_datasets_without_a_length_are_refused(
    workers2: sw.Workers, tmp_path: Path
) -> None:
    for plain, iterable in workers2.run(errors, str(tmp_path)):
        assert "expected one that was sharded" in plain
        assert "expected one with a length" in iterable
