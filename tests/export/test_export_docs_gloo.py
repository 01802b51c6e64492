"""The code blocks of docs/export.md are one program, which runs on four ranks."""

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "export.md"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 8, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def run(folder):
    names = {"make_model": Net, "make_attention": Attention, "folder": folder}
    shown = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(shown):
        warnings.simplefilter("ignore")  # of torch.export
        found = re.findall(r"```python\n(.*?)```(\n+```text)?", PAGE.read_text("utf-8"), re.DOTALL)
        for each, is_program in found:
            if not is_program:  # tests/project/test_readme.py runs it
                exec(compile(each, "docs/export.md", "exec"), names)
    assert shown.getvalue().splitlines()[-1] in PAGE.read_text("utf-8")
    whole = Net()(names["x"]).detach()
    torch.testing.assert_close(names["y"].detach(), whole)
    torch.testing.assert_close(names["same"].detach(), whole)
    at = names["both"].get_local_rank("dp")
    torch.testing.assert_close(names["half"].detach(), whole.chunk(2)[at])
    alone = Net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (alone(names["x"]) - 2 * names["x"]).square().mean()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(names["loss"], loss.detach())
    many = torch.ones(9, 5, 8)
    torch.testing.assert_close(names["anything"](many).detach(), Net()(many).detach())
    shapes = [each.state_dict["layers.1.up.weight"].shape for each in names["programs"]]
    assert shapes == [(4, 8)] * 4


@pytest.mark.slow
def test_the_page_on_exported_programs_is_a_program_that_runs(workers4, tmp_path):
    workers4.run(run, str(tmp_path))
