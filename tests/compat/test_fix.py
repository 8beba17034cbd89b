"""Pure renames are rewritten where they stand, once, and nothing else is touched."""

import json
import textwrap
from pathlib import Path

import pytest

from lockstep.compat.check import check
from lockstep.compat.fix import fix, fix_python
from lockstep.compat.names import NAMES


def assert_fixed(before: str, after: str) -> None:
    """`before` becomes `after`, which stays as it is."""
    before, after = textwrap.dedent(before), textwrap.dedent(after)
    assert fix_python(before) == after
    assert fix_python(after) == after


class TestExpressions:
    def test_formatting_and_comments_stay(self):
        assert_fixed(
            """
            import jax

            def  f( x ):   # odd spaces
                y = jax.tree_map( lambda a : a,x )  # keep  me
                return (jax.tree_leaves) (y) ; z = 'jax.tree_map'
            """,
            """
            import jax

            def  f( x ):   # odd spaces
                y = jax.tree.map( lambda a : a,x )  # keep  me
                return (jax.tree.leaves) (y) ; z = 'jax.tree_map'
            """,
        )

    def test_through_whatever_name_the_module_has(self):
        assert_fixed(
            """
            import jax as j
            import jax.numpy as jnp
            from jax import tree_util
            j.tree_map(f, x), tree_util.tree_multimap(f, x), jnp.product(x), j.host_id()
            """,
            """
            import jax as j
            import jax.numpy as jnp
            from jax import tree_util
            j.tree.map(f, x), tree_util.tree_map(f, x), jnp.prod(x), j.process_index()
            """,
        )

    def test_an_import_is_added_where_one_is_needed(self):
        assert_fixed(
            '''
            """About."""
            from __future__ import annotations
            import jax.numpy as jnp
            def f(x: jnp.DeviceArray) -> jnp.DeviceArray: ...
            ''',
            '''
            """About."""
            from __future__ import annotations
            import jax.numpy as jnp
            import jax

            def f(x: jax.Array) -> jax.Array: ...
            ''',
        )

    def test_a_submodule_that_jax_does_not_load_is_imported(self):
        fixed = fix_python("import jax\np = jax.core.Primitive('p')\n")
        assert "import jax.extend.core\n" in fixed
        assert "p = jax.extend.core.Primitive('p')" in fixed
        assert fix_python(fixed) == fixed
        exec(fixed, {})

    def test_keywords_of_clip(self):
        assert_fixed(
            """
            import jax.numpy as jnp, numpy as np
            jnp.clip(x, a_min = 0, a_max=1); np.clip(x, a_min=0, a_max=1)
            """,
            """
            import jax.numpy as jnp, numpy as np
            jnp.clip(x, min = 0, max=1); np.clip(x, a_min=0, a_max=1)
            """,
        )


class TestImports:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("from jax import tree_map", "from jax.tree_util import tree_map"),
            (
                "from jax import lax, tree_map as tm, jit  # some",
                "from jax import lax, jit  # some\n"
                "from jax.tree_util import tree_map as tm",
            ),
            (
                "from jax import tree_multimap",
                "from jax.tree_util import tree_map as tree_multimap",
            ),
            ("from jax.config import config", "from jax import config"),
            ("import jax.config", "import jax"),
            (
                "from jax.experimental import PartitionSpec as P, optimizers",
                "from jax.sharding import PartitionSpec as P\n"
                "from jax.example_libraries import optimizers",
            ),
            (
                "from jax.experimental.optimizers import adam, sgd",
                "from jax.example_libraries.optimizers import adam, sgd",
            ),
            (
                "import jax.experimental.optimizers as opt",
                "import jax.example_libraries.optimizers as opt",
            ),
            ("from jax.experimental.maps import Mesh", "from jax.sharding import Mesh"),
            (
                "from jax.lib.xla_bridge import get_backend",
                "from jax.extend.backend import get_backend",
            ),
            ("from flax.optim import DynamicScale", None),
        ],
    )
    def test_from_the_new_home_under_the_old_name(self, before, after):
        home = "from flax.training.dynamic_scale import DynamicScale"
        assert_fixed(f"{before}\nx = 1\n", f"{after or home}\nx = 1\n")

    def test_over_several_lines(self):
        assert_fixed(
            """
            from jax import (
                lax,  # collectives
                tree_map,
                jit,
                tree_leaves,
            )
            """,
            """
            from jax import (
                lax,  # collectives
                jit,
            )
            from jax.tree_util import tree_map, tree_leaves
            """,
        )

    def test_comments_beside_the_names_stay(self):
        assert_fixed(
            """
            from jax import (  # all of it
                tree_map,  # moved
                lax,  # kept
                # on its own
                tree_leaves,  # last
            )
            """,
            """
            # moved
            # last
            from jax import (  # all of it
                lax,  # kept
                # on its own
            )
            from jax.tree_util import tree_map, tree_leaves
            """,
        )

    def test_inside_a_function(self):
        assert_fixed(
            "def f():\n    from jax import tree_map\n    return tree_map\n",
            "def f():\n    from jax.tree_util import tree_map\n    return tree_map\n",
        )

    def test_every_pure_rename_can_be_imported_after_it(self):
        for row in NAMES.values():
            if row.rename and not row.old.startswith("jax.Array"):
                module, _, name = row.old.rpartition(".")
                exec(fix_python(f"from {module} import {name}\n"), {})


class TestLinesOfSeveralStatements:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (
                "import jax; from jax import tree_map; x = 1",
                "import jax; from jax.tree_util import tree_map; x = 1",
            ),
            (
                "from jax import tree_map, jit ;x = tree_map",
                "from jax import jit; from jax.tree_util import tree_map ;x = tree_map",
            ),
            (
                "import jax.experimental.optimizers as o; y = jax.tree_map(f, x);",
                "import jax.example_libraries.optimizers as o; y = jax.tree.map(f, x);",
            ),
            (
                "def f(): from jax import tree_map; return tree_map",
                "def f(): from jax.tree_util import tree_map; return tree_map",
            ),
        ],
    )
    def test_they_stay_on_their_line(self, before, after):
        assert_fixed(f"import jax\n{before}\n", f"import jax\n{after}\n")


class TestWhatIsLeftAlone:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "x = 1",
            "import jax\nx = jax.device_put_replicated(y, d)\n",
            "import jax\nx = jax.random.shuffle(key, y)\n",
            "import jax\njax.pmap(f); jax.experimental.host_callback.id_tap(f)\n",
            "try:\n    from jax import tree_map\nexcept ImportError:\n    pass\n",
            "import jax\nif hasattr(jax, 'tree_map'):\n    f = jax.tree_map\n",
            "from jax import tree\nfrom mylib import tree_map\n",
            "def f(jax):\n    return jax.tree_map\n",
            "print 'python 2'; jax.tree_map\n",
            "import jax  # jax.tree_map\n",
        ],
    )
    def test_text(self, text):
        assert fix_python(text) == text

    def test_line_ends(self):
        assert fix_python("import jax\r\njax.tree_map\r\n") == (
            "import jax\r\njax.tree.map\r\n"
        )

    def test_commands_of_a_notebook(self):
        assert_fixed(
            """
            %pip install "jax[cuda12_pip]" \\
               flax
            import jax
            if True:
                !ls -l  # a comment
                jax.tree_map(f, x)
            %time jax.tree_map
            """,
            """
            %pip install "jax[cuda12]" \\
               flax
            import jax
            if True:
                !ls -l  # a comment
                jax.tree.map(f, x)
            %time jax.tree_map
            """,
        )


class TestFiles:
    def test_only_changed_files_are_written(self, tmp_path):
        old, new = tmp_path / "old.py", tmp_path / "new.py"
        old.write_text("import jax\njax.tree_map\n")
        new.write_text("import jax\njax.tree.map\n")
        written = new.stat().st_mtime_ns
        assert fix([tmp_path]) == [old]
        assert old.read_text() == new.read_text()
        assert new.stat().st_mtime_ns == written
        assert fix([tmp_path]) == []

    def test_one_that_is_nested_too_deeply_does_not_keep_the_others(self, tmp_path):
        deep, old = tmp_path / "deep.py", tmp_path / "old.py"
        text = "import jax\nx = " + " + ".join(["1"] * 3000) + "\njax.tree_map\n"
        deep.write_text(text)
        old.write_text("import jax\njax.tree_map\n")
        assert fix([tmp_path]) == [old]
        assert deep.read_text() == text

    def test_requirements(self, tmp_path):
        file = tmp_path / "requirements.txt"
        file.write_text(
            "jax[cuda12_pip]==0.4.30\njax[cuda11_pip]\njax[k8s,cuda12_pip]\n"
        )
        assert fix([file]) == [file]
        assert file.read_text() == (
            "jax[cuda12]==0.4.30\njax[cuda11_pip]\njax[k8s,cuda12]\n"
        )

    @pytest.mark.parametrize(
        "style",
        [
            {"indent": 1},
            {"indent": 2},
            {"indent": "\t"},
            {"indent": 0},
            {"indent": None},
            {"indent": None, "separators": (",", ":")},
            {"indent": 4, "separators": (",", ":")},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("end", ["", "\n", "\r\n"])
    @pytest.mark.parametrize("ascii_only", [True, False])
    def test_notebooks_keep_their_json(self, tmp_path, style, end, ascii_only):
        def text_of(second_line: str, command: str) -> str:
            cells = [
                ("markdown", ["Größe of jax.tree_map"]),
                ("code", [command, "from jax import tree_map"]),
                ("code", ["%%bash\n", "jax.tree_map"]),
                ("code", ["x = (\n", "jax.tree_map\n"]),
                ("code", ["y = 'é'\n", second_line, "z = 1"]),
            ]
            rows = [
                {"cell_type": k, "id": "x", "metadata": {}, "source": s, "outputs": []}
                for k, s in cells
            ]
            whole = {"cells": rows, "metadata": {"a": 1.0}, "nbformat": 4}
            text = json.dumps(whole, ensure_ascii=ascii_only, **style)
            return text.replace("\n", "\r\n" if end == "\r\n" else "\n") + end

        file = tmp_path / "guide.ipynb"
        before = text_of("jax.tree_map(f, x)\n", "import jax\n")
        after = text_of("jax.tree.map(f, x)\n", "import jax\n")
        before, after = (
            t.replace("import tree_map", "import jit") for t in (before, after)
        )
        file.write_bytes(before.encode())
        assert fix([file]) == [file]
        assert file.read_bytes().decode() == after
        assert fix([file]) == []

    def test_a_name_imported_in_one_cell_and_used_in_another(self, tmp_path):
        file = tmp_path / "guide.ipynb"
        cells = ["import jax.numpy as jnp", "def f(x: jnp.DeviceArray): ..."]
        rows = [{"cell_type": "code", "source": [c]} for c in cells]
        file.write_text(json.dumps({"cells": rows}))
        fix([file])
        fixed = [c["source"] for c in json.loads(file.read_text())["cells"]]
        assert fixed == [
            ["import jax.numpy as jnp\n", "import jax\n"],
            ["def f(x: jax.Array): ..."],
        ]

    def test_the_checker_has_nothing_left_to_say_of_them(self, tmp_path):
        names = [row.old for row in NAMES.values() if row.rename and row.gone]
        imports = "import flax, jax, optax\nimport jax.lib\n"
        text = imports + "".join(f"{name}\n" for name in names)
        file = tmp_path / "all.py"
        file.write_text(text)
        assert {f.rule for f in check([file])} == {"gone-name"}
        fix([file])
        assert not check([file])

    def test_another_encoding_stays(self, tmp_path):
        file = Path(tmp_path / "latin.py")
        text = "# -*- coding: latin-1 -*-\n# é\nimport jax\njax.tree_map\n"
        file.write_bytes(text.encode("latin-1"))
        assert fix([file]) == [file]
        after = text.replace("tree_map", "tree.map").encode("latin-1")
        assert file.read_bytes() == after

    @pytest.mark.parametrize("head", ["", "# coding: klingon\n"])
    def test_what_cannot_be_decoded_is_left_alone_and_told_of(
        self, tmp_path, head, caplog
    ):
        file = Path(tmp_path / "latin.py")
        file.write_bytes(f"{head}# é\nimport jax\njax.tree_map\n".encode("latin-1"))
        assert fix([file]) == []
        (said,) = caplog.messages
        assert "latin.py was left as it is" in said and "encoding" in said

    def test_a_byte_order_mark_stays(self, tmp_path):
        file = Path(tmp_path / "marked.py")
        file.write_text("import jax\njax.tree_map\n", encoding="utf-8-sig")
        assert [finding.line for finding in check([file])] == [2]
        assert fix([file]) == [file]
        assert file.read_bytes() == b"\xef\xbb\xbfimport jax\njax.tree.map\n"
        assert fix([file]) == []
