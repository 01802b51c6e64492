"""`shardwise migrate` rewrites the imports of programs, and nothing else; it says what is left."""

import stat
import sys
from textwrap import dedent

import pytest

from shardwise import cli
from shardwise.cli import counterparts, migrate
from shardwise.cli.import_rewriter import SourceError, rewrite


def rewritten(text):
    """Rewrite a program that leaves nothing to do by hand; a second run must change nothing."""
    result = rewrite(dedent(text))
    assert result.findings == ()
    assert rewrite(result.text) == result
    return result.text


def findings(text):
    return [(each.line, each.message) for each in rewrite(dedent(text)).findings]


# ---- imports


@pytest.mark.parametrize(
    "old, new",
    [
        ("from torch.distributed.tensor import DTensor", "from shardwise.tensor import DTensor"),
        (
            "from torch.distributed.tensor.parallel import ColwiseParallel as C",
            "from shardwise.tensor.parallel import ColwiseParallel as C",
        ),
        ("from torch.distributed._tensor import Shard", "from shardwise.tensor import Shard"),
        (
            "from torch.distributed.tensor.placement_types import Shard, Replicate",
            "from shardwise.tensor.placement_types import Shard, Replicate",
        ),
        (
            "from torch.distributed.device_mesh import DeviceMesh",
            "from shardwise.device_mesh import DeviceMesh",
        ),
        (
            "from torch.distributed.fsdp import fully_shard",
            "from shardwise.fsdp import fully_shard",
        ),
        (
            "from torch.distributed._composable.fsdp import fully_shard",
            "from shardwise.fsdp import fully_shard",
        ),
        (
            "from torch.distributed._composable.fsdp.fully_shard import FSDPModule",
            "from shardwise.fsdp import FSDPModule",
        ),
        (
            "from torch.distributed._composable.replicate import replicate",
            "from shardwise.fsdp import replicate",
        ),
        (
            "from torch.distributed._composable import replicate",
            "from shardwise.fsdp import replicate",
        ),
        (
            "from torch.distributed import init_device_mesh, DeviceMesh",
            "from shardwise import init_device_mesh, DeviceMesh",
        ),
        ("from torch.distributed import tensor", "from shardwise import tensor"),
        ("from torch.distributed import fsdp as f", "from shardwise import fsdp as f"),
        ("from torch.distributed import _tensor", "from shardwise import tensor as _tensor"),
        ("from torch.distributed.tensor import *", "from shardwise.tensor import *"),
        ("import torch.distributed.tensor", "import shardwise.tensor"),
        ("import torch.distributed.tensor as dt", "import shardwise.tensor as dt"),
        (
            "import os, torch.distributed.tensor as dt, sys",
            "import os, shardwise.tensor as dt, sys",
        ),
        ("from torch . distributed . tensor import Shard", "from shardwise.tensor import Shard"),
        (
            "from torch.distributed.tensor \\\n    import Shard, \\\n    Replicate  # both",
            "from shardwise.tensor \\\n    import Shard, \\\n    Replicate  # both",
        ),
    ],
)
def test_imports_move_in_all_their_forms(old, new):
    assert rewritten(f"{old}\n") == f"{new}\n"


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nimport torch.distributed as dist\ndist.all_reduce(torch.ones(2))\n",
        "from torch.distributed import all_reduce\n",
        "from torch.distributed.checkpoint.state_dict import get_state_dict\n",
        "import torch.distributed.checkpoint as dcp\n",
        "import torch.distributed._functional_collectives as funcol\n",
        "from torch.distributed.pipelining import PipelineStage\n",
        "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply\n",
        "from . import tensor\nfrom .torch.distributed.tensor import DTensor\n",
        "from torch.distributed.tensors import DTensor\n",  # not the module, but its beginning
        "x = 'see torch.distributed.tensor for more'\n",
        '"""torch.distributed.tensor"""\n',
        "# torch.distributed.tensor\n",
    ],
)
def test_what_stays_torchs_is_not_touched(text):
    assert rewritten(text) == text


def test_comments_and_formatting_of_a_long_import_stay():
    old = """\
    from torch.distributed.tensor import (  # all of it
        DTensor,  # the tensor
        # where it lies
        Replicate, Shard as S
        ,
    )
    """
    assert rewritten(old) == dedent(old).replace("torch.distributed.", "shardwise.")


def test_names_that_stay_torchs_get_an_import_of_their_own():
    old = "from torch.distributed import all_reduce, init_device_mesh as mesh, tensor  # three\n"
    assert rewritten(old) == dedent("""\
        from torch.distributed import all_reduce
        from shardwise import init_device_mesh as mesh, tensor  # three
        """)
    old = """\
    def f():
        from torch.distributed import (
            all_reduce,  # the sum
            # the grid
            DeviceMesh,
        )
        return all_reduce, DeviceMesh
    """
    assert rewritten(old) == dedent("""\
        def f():
            from torch.distributed import (
                all_reduce,  # the sum
            )
            from shardwise import (
                # the grid
                DeviceMesh,
            )
            return all_reduce, DeviceMesh
        """)
    old = "if True: from torch.distributed import all_reduce, DeviceMesh; x = 1\n"
    new = (
        "if True: from torch.distributed import all_reduce; from shardwise import DeviceMesh; "
        "x = 1\n"
    )
    assert rewritten(old) == new


# ---- names with attributes


def test_attributes_are_followed_through_aliases():
    old = """\
    import torch
    import torch.distributed as dist  # collectives
    from torch import distributed as d

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    style = torch.distributed.tensor.parallel.ColwiseParallel()
    placements = [d.tensor.Shard(0), (dist
        .tensor.Replicate())]
    d.init_device_mesh("cpu", (2,)), dist.DeviceMesh.from_group
    dist.all_reduce(torch.ones(2))
    """
    assert rewritten(old) == dedent("""\
        import torch
        import torch.distributed as dist  # collectives
        from torch import distributed as d
        import shardwise.device_mesh
        import shardwise.tensor.parallel

        mesh = shardwise.device_mesh.init_device_mesh("cpu", (2,))
        style = shardwise.tensor.parallel.ColwiseParallel()
        placements = [shardwise.tensor.Shard(0), (shardwise.tensor.Replicate())]
        shardwise.init_device_mesh("cpu", (2,)), shardwise.DeviceMesh.from_group
        dist.all_reduce(torch.ones(2))
        """)


def test_an_import_that_also_brought_torch_still_does_if_torch_is_used():
    old = """\
    import torch.distributed.tensor
    torch.distributed.tensor.Shard(0)
    torch.nn.Linear(2, 2)
    """
    assert rewritten(old) == dedent("""\
        import torch.distributed, shardwise.tensor
        shardwise.tensor.Shard(0)
        torch.nn.Linear(2, 2)
        """)
    with_torch = f"import torch\n{dedent(old)}"
    assert "import torch\nimport shardwise.tensor\n" in rewritten(with_torch)


def test_names_of_other_scopes_are_not_confused():
    old = """\
    import torch.distributed as dist

    def parameter(dist):
        return dist.tensor.Shard(0)

    def local():
        dist = object()
        return [dist.tensor.Shard for x in ()], lambda: dist.tensor

    class Model:
        dist = 1
        def method(self):
            return dist.tensor.Shard(0)

    def comprehension(things):
        return [dist.tensor for dist in things]
    """
    new = dedent(old).replace("(self):\n        return dist", "(self):\n        return shardwise")
    first = "import torch.distributed as dist\n"
    assert rewritten(old) == new.replace(first, f"{first}import shardwise.tensor\n")


def test_imports_in_functions_conditions_and_blocks_move():
    old = """\
    from typing import TYPE_CHECKING
    if TYPE_CHECKING:
        from torch.distributed.tensor import DTensor
    try:
        import torch.distributed.tensor as dt
    except ImportError:
        dt = None

    def f():
        import torch.distributed as dist
        with x, (yield):
            return dist.tensor.Shard(0)
    """
    assert rewritten(old) == dedent("""\
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from shardwise.tensor import DTensor
        try:
            import shardwise.tensor as dt
        except ImportError:
            dt = None

        def f():
            import torch.distributed as dist
            import shardwise.tensor
            with x, (yield):
                return shardwise.tensor.Shard(0)
        """)


def test_a_name_that_is_none_after_a_failed_import_is_clear_and_other_values_are_not():
    program = """\
    try:
        import torch.distributed as dist
    except ImportError:
        dist = {}
    x = dist.tensor.Shard(0)
    """
    assert "shardwise.tensor.Shard(0)" in rewritten(program.format("None"))
    assert rewrite(dedent(program.format("Fake()"))).text == dedent(program.format("Fake()"))
    assert findings(program.format("Fake()")) == [
        (5, "torch.distributed.tensor.Shard: write shardwise.tensor.Shard, and import "
            "shardwise.tensor"),
    ]  # fmt: skip


def test_a_program_with_something_else_called_shardwise_is_left_to_its_author():
    text = "import torch.distributed as dist\nshardwise = 1\ndist.tensor.Shard(0)\n"
    assert rewrite(text).text == text
    assert len(findings(text)) == 1


def test_a_name_with_parentheses_within_is_left_to_its_author():
    text = "import torch.distributed as d\n(d).tensor.Shard(0)\n(d.tensor).Shard(0)\n"
    assert rewrite(text).text == text
    assert [line for line, _ in findings(text)] == [2, 3]


def test_an_import_for_type_checkers_is_none_for_the_program():
    old = """\
    from typing import TYPE_CHECKING
    import torch.distributed as dist
    if TYPE_CHECKING:
        import torch.distributed.tensor
    dist.tensor.Shard(0)
    """
    assert "as dist\nimport shardwise.tensor\nif TYPE_CHECKING" in rewritten(old)


def test_statements_beside_others_in_a_line_are_kept_together():
    old = "import torch.distributed as d; m = d.tensor.Shard(0)\n"
    new = "import torch.distributed as d; import shardwise.tensor; m = shardwise.tensor.Shard(0)\n"
    assert rewritten(old) == new


def test_positions_are_those_of_characters_not_of_bytes():
    old = 'import torch.distributed as d\nx = "äöü€", d.tensor.Shard(0), "é"\n'
    assert rewritten(old).endswith('x = "äöü€", shardwise.tensor.Shard(0), "é"\n')
    old = "\fimport torch.distributed as d\n\f\nx = d.tensor.Shard(0)\n"
    assert rewritten(old).endswith("x = shardwise.tensor.Shard(0)\n")


def test_torch_is_kept_once():
    old = """\
    import torch.distributed.tensor
    import torch.distributed.fsdp
    import torch.distributed.tensor
    torch.nn.Linear(2, 2)
    """
    new = """\
    import torch.distributed, shardwise.tensor
    import shardwise.fsdp
    import shardwise.tensor
    torch.nn.Linear(2, 2)
    """
    assert rewritten(old) == dedent(new)
    old = "import torch, torch.distributed.fsdp\ntorch.distributed.fsdp.fully_shard(torch.nn)\n"
    new = "import torch, shardwise.fsdp\nshardwise.fsdp.fully_shard(torch.nn)\n"
    assert rewritten(old) == new


def test_a_module_of_which_a_name_stays_torchs_is_imported_beside_ours_once():
    result = rewrite(
        dedent("""\
        import torch.distributed.fsdp, torch.distributed.tensor
        torch.distributed.fsdp.fully_shard
        torch.distributed.fsdp.FullyShardedDataParallel
        torch.ones(1)
        """)
    )
    assert result.text.splitlines() == [
        "import torch.distributed.fsdp, shardwise.fsdp, shardwise.tensor",
        "shardwise.fsdp.fully_shard",
        "torch.distributed.fsdp.FullyShardedDataParallel",
        "torch.ones(1)",
    ]
    assert rewrite(result.text).text == result.text


def test_torch_is_kept_where_another_import_of_it_may_not_run():
    old = """\
    from typing import TYPE_CHECKING
    if TYPE_CHECKING:
        import torch
    import torch.distributed.tensor
    torch.nn.Linear(2, 2)
    """
    assert "\nimport torch.distributed, shardwise.tensor\n" in rewritten(old)


def test_names_in_f_strings_are_replaced_or_listed_but_never_other_characters():
    old = 'import torch.distributed as d\nx = f"""\n{d.tensor.Shard(0)!r} {d.rank}\n"""\n'
    result = rewrite(old)
    replaced = old.replace("d.tensor", "shardwise.tensor")
    assert result.text.replace("import shardwise.tensor\n", "") in (old, replaced)
    assert len(result.findings) == (result.text == old)


# ---- what is left


def test_names_without_a_counterpart_stay_and_are_listed_with_what_to_write_instead():
    text = """\
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
    import torch.distributed.fsdp.wrap
    import torch.distributed.tensor as dt
    dt.no_such_name(1)
    """
    result = rewrite(dedent(text))
    assert result.text.startswith(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "from shardwise.fsdp import fully_shard\n"
        "import torch.distributed.fsdp.wrap\n"
        "import shardwise.tensor as dt\n"
    )
    (first, second, third) = result.findings
    assert first.line == 1 and "FullyShardedDataParallel has no counterpart" in first.message
    assert "fully_shard" in first.message.partition(":")[2]
    assert second.line == 2 and "torch.distributed.fsdp.wrap has no" in second.message
    assert third.line == 4 and "torch.distributed.tensor.no_such_name has no" in third.message


@pytest.mark.parametrize(
    "statement, module",
    [
        ("import torch.distributed.fsdp as fsdp", "fsdp"),
        ("from torch.distributed import fsdp", "fsdp"),
        ("from torch.distributed import tensor", "tensor"),
    ],
)
def test_names_without_a_counterpart_are_listed_again_by_a_second_run(statement, module):
    name = {"fsdp": "FullyShardedDataParallel", "tensor": "_shards_wrapper"}[module]
    result = rewrite(f"{statement}\n{module}.{name}\n")
    assert [each.line for each in result.findings] == [2]
    assert "distributed" not in result.text
    assert rewrite(result.text) == result


def test_names_that_only_shardwise_has_are_not_listed():
    text = "import shardwise as sw\nimport shardwise.fsdp as fsdp\nsw.simulate\nfsdp.replicate\n"
    assert findings(text) == [] == findings("from shardwise import fsdp\nfsdp.unknown\n")


def test_names_in_strings_are_listed():
    text = """\
    import importlib
    importlib.import_module("torch.distributed.tensor.parallel")
    def f(x: "list[torch.distributed.tensor.DTensor]"): ...
    """
    (module, annotation) = findings(text)
    assert module[0] == 2 and module[1].endswith("write shardwise.tensor.parallel")
    assert annotation[0] == 3 and annotation[1].endswith("write shardwise.tensor.DTensor")


def test_names_of_a_star_import_without_a_counterpart_are_listed():
    text = "from torch.distributed.fsdp import *\nFullyShardedDataParallel(model)\n"
    assert rewrite(text).text.startswith("from shardwise.fsdp import *\n")
    assert [line for line, _ in findings(text)] == [2]


def test_a_star_import_of_a_module_that_stays_may_bring_names_that_move():
    text = "from torch.distributed import *\nmesh = init_device_mesh('cpu', (2,))\nget_rank()\n"
    message = "it imports init_device_mesh: add from shardwise import init_device_mesh after it"
    assert findings(text) == [(1, message)]
    assert findings(text + "def init_device_mesh(*args): ...\n") == []


def test_names_that_behave_differently_are_noted_once(tmp_path, monkeypatch, capsys):
    name = "torch.distributed.tensor.DTensor"
    monkeypatch.setitem(counterparts.DIFFERENT, name, "it is the shard.")
    for number in (1, 2):
        (tmp_path / f"{number}.py").write_text(f"import torch\n{TORCH}")
    assert cli.main(["migrate", str(tmp_path)]) == 0
    printed = capsys.readouterr().err
    assert printed.count("behaves differently") == 1
    assert f"note: {tmp_path}/1.py:2: {name} behaves differently: it is the shard.\n" in printed


def test_a_module_that_stays_torchs_and_knows_only_torchs_tensors_is_noted():
    text = "from torch.distributed._local_tensor import LocalTensorMode\n"
    result = rewrite(text)
    assert (result.text, result.findings) == (text, ())
    (note,) = result.notes
    assert "stays torch's" in note.message and "sw.simulate" in note.message


def test_a_text_that_is_no_program_is_refused_with_its_line():
    with pytest.raises(SourceError, match=r"^2: "):
        rewrite("x = 1\nprint 'python 2'\n")
    with pytest.raises(SourceError, match="null bytes"):
        rewrite("x = 1\0")


# ---- files and the command

TORCH = "from torch.distributed.tensor import DTensor\n"
OURS = "from shardwise.tensor import DTensor\n"


def test_a_dry_run_shows_the_difference_and_changes_nothing(tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(f"import torch\n{TORCH}")
    assert cli.main(["migrate", str(path)]) == 0
    printed = capsys.readouterr()
    assert f"-{TORCH}+{OURS}" in printed.out
    assert printed.out.startswith(f"--- a{path}\n+++ b{path}\n")
    assert printed.err == (
        "files read: 1, to change by --write: 1, places left to change by hand: 0, errors: 0\n"
    )
    assert path.read_text() == f"import torch\n{TORCH}"


def test_write_changes_files_once(tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(TORCH)
    path.chmod(0o750)
    assert cli.main(["migrate", "--write", str(path)]) == 0
    assert path.read_text() == OURS
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert [each.name for each in tmp_path.iterdir()] == ["program.py"]
    written = path.stat().st_mtime_ns
    assert cli.main(["migrate", "--write", str(path)]) == 0
    assert path.stat().st_mtime_ns == written
    assert capsys.readouterr().out == ""


def test_exit_codes_tell_scripts_what_is_left(tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text("x = 1\n")
    assert cli.main(["migrate", str(path)]) == 0
    path.write_text("from torch.distributed.fsdp import FullyShardedDataParallel\n")
    assert cli.main(["migrate", str(path)]) == 1
    assert f"{path}:1: torch.distributed.fsdp.Fully" in capsys.readouterr().err
    path.write_text("print 'python 2'\n")
    (tmp_path / "other.py").write_text(TORCH)
    assert cli.main(["migrate", "--write", str(tmp_path)]) == 2
    assert f"{path}:1: Missing parentheses" in capsys.readouterr().err
    assert (tmp_path / "other.py").read_text() == OURS  # an error does not stop the others
    assert cli.main(["migrate", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: there is no such file or folder" in capsys.readouterr().err


def test_encodings_line_ends_and_byte_order_marks_stay(tmp_path):
    programs = {
        "latin": "# coding: latin-1\n# é\n" + TORCH,
        "dos": f"# é\n{TORCH}x = 1\n".replace("\n", "\r\n"),
        "mark": f"\ufeff# é\n{TORCH}",
        "no_end": TORCH.rstrip("\n"),
    }
    encodings = {"latin": "latin-1"}
    for name, text in programs.items():
        data = text.encode(encodings.get(name, "utf-8"))
        path = tmp_path / f"{name}.py"
        path.write_bytes(data)
        assert cli.main(["migrate", "--write", str(path)]) == 0
        old, new = (x.strip().encode() for x in (TORCH, OURS))
        assert path.read_bytes() == data.replace(old, new)
    (tmp_path / "bad.py").write_bytes(b"# coding: utf-8\nx = '\xff'\n")
    assert cli.main(["migrate", str(tmp_path / "bad.py")]) == 2


def test_new_lines_have_the_line_ends_of_the_file():
    text = "import torch.distributed as d\r\nd.tensor.Shard(0)\r\n"
    assert "\n" not in rewritten(text).replace("\r\n", "")


def test_folders_are_searched_without_environments_and_hidden_folders(tmp_path):
    used = ["a.py", "package/b.py", "package/stub.pyi"]
    unused = [".git/c.py", "venv/lib/d.py", "x/__pycache__/e.py", "notes.txt"]
    for name in (*used, *unused):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TORCH)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    found = migrate.find_files([str(tmp_path), str(tmp_path / "a.py")])
    assert sorted(str(each.relative_to(tmp_path)) for each in found) == used


def test_notebooks_are_not_rewritten_but_listed(tmp_path, capsys):
    path = tmp_path / "notebook.ipynb"
    path.write_text('{"cells": [\n"from torch.distributed.tensor import DTensor"\n]}')
    before = path.read_text()
    assert cli.main(["migrate", "--write", str(path)]) == 1
    assert f"{path}:2: torch.distributed.tensor in a notebook" in capsys.readouterr().err
    assert path.read_text() == before


@pytest.mark.parametrize(
    "line, name",
    [
        ("import torch.distributed.tensor\\n", "torch.distributed.tensor"),
        ("import torch.distributed.fsdp as fsdp, os", "torch.distributed.fsdp"),
        ("import torch.distributed.fsdp, os", "torch.distributed.fsdp"),
        ("from torch.distributed import get_rank, fsdp\\n", "torch.distributed.fsdp"),
        (
            "from torch.distributed import init_device_mesh\\n",
            "torch.distributed.init_device_mesh",
        ),
        ("torch.distributed.DeviceMesh('cpu', [0])", "torch.distributed.DeviceMesh"),
    ],
)
def test_notebooks_are_searched_for_names_in_every_form(line, name, tmp_path, capsys):
    path = tmp_path / "notebook.ipynb"
    path.write_text(f'{{"cells": [\n"{line}"\n]}}')
    assert cli.main(["migrate", str(path)]) == 1
    assert f"{path}:2: {name} in a notebook" in capsys.readouterr().err


def test_names_of_a_notebook_that_stay_torchs_are_not_listed(tmp_path):
    path = tmp_path / "notebook.ipynb"
    path.write_text('"import torch.distributed.fsdp_utils, torch.distributed.checkpoint as dcp"')
    assert cli.main(["migrate", str(path)]) == 0


def test_a_link_stays_a_link_to_the_changed_file(tmp_path):
    path, link = tmp_path / "program.py", tmp_path / "link.py"
    path.write_text(TORCH)
    link.symlink_to(path)
    assert cli.main(["migrate", "--write", str(tmp_path)]) == 0
    assert link.is_symlink() and path.read_text() == OURS


def test_a_file_that_cannot_be_replaced_is_left_whole(tmp_path, monkeypatch, capsys):
    path = tmp_path / "program.py"
    path.write_text(TORCH)

    def fail(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(migrate.os, "replace", fail)
    assert cli.main(["migrate", "--write", str(path)]) == 2
    assert "cannot write it: Permission denied" in capsys.readouterr().err
    assert path.read_text() == TORCH
    assert [each.name for each in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.needs("rich")
def test_the_difference_has_colours_on_a_terminal(tmp_path, monkeypatch, capsys):
    path = tmp_path / "program.py"
    path.write_text(TORCH)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli.main(["migrate", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b[" in printed and OURS.strip() in printed
