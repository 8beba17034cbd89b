"""The loop: what waits or hangs in it is found, what does not is not."""

import pytest
from marked_lines import assert_marked

STEP = """
@partial(jax.pmap, axis_name="i")
def train_step(state, batch):
    return state, {"loss": lax.pmean(batch, "i")}

"""


def in_loop(*lines: str) -> str:
    """A training loop with these lines in it."""
    body = "\n".join(f"    {line}" for line in lines)
    head = "for i, batch in enumerate(batches):\n"
    return f"{STEP}{head}    state, metrics = train_step(state, batch)\n{body}\n"


class TestFetchInLoop:
    def found(self, text):
        assert_marked("fetch-in-loop", text)

    @pytest.mark.parametrize(
        "line",
        [
            'loss = float(metrics["loss"][0])',
            'losses.append(metrics["loss"].item())',
            "history.append(jax.device_get(metrics))",
            'bar.set_postfix(loss=float(jnp.mean(metrics["loss"])))',
            'values.append(np.asarray(metrics["loss"]))',
        ],
    )
    def test_every_step(self, line):
        self.found(in_loop(f"{line}  # <-"))

    def test_said_once_a_loop(self):
        first = 'a = float(metrics["loss"][0])  # <-'
        self.found(in_loop(first, 'b = float(metrics["loss"][1])'))

    def test_by_name_where_the_step_is_an_argument(self):
        self.found("""
            def step(state, batch):
                return state, lax.pmean(batch, "i")

            def train(state, batches, p_step):
                while True:
                    state, loss = p_step(state, next(batches))
                    print(float(loss[0]))  # <-

            p_step = jax.pmap(step, axis_name="i")
            train(state, batches, p_step)
        """)

    @pytest.mark.parametrize("test", ["i % 100 == 0", "is_main", "step in marks"])
    def test_now_and_then_is_right(self, test):
        self.found(in_loop(f'if {test}: print(float(metrics["loss"][0]))'))

    def test_reading_in_an_assertion_is_right(self):
        line = 'assert float(metrics["loss"][0]) == 1'
        self.found(in_loop(line, "np.testing.assert_allclose(np.asarray(metrics), 1)"))

    def test_collected_and_read_at_the_end_is_right(self):
        text = in_loop("history.append(metrics)")
        self.found(text + "losses = [float(m['loss'][0]) for m in history]\n")

    def test_other_numbers_are_not_the_device_s(self):
        self.found(in_loop("rows += int(len(batch))", "x = np.asarray(batch)"))

    def test_a_loop_without_a_mapped_step_is_not_judged(self):
        self.found("""
            for x in data:
                y = model(x)
                print(float(y))
        """)

    def test_a_timed_loop_waits_on_purpose(self):
        self.found(in_loop('metrics["loss"].block_until_ready()'))


class TestOrderedPrint:
    def found(self, text):
        assert_marked("ordered-print", text)

    def test_in_a_mapped_function_and_what_it_calls(self):
        self.found("""
            def show(x):
                jax.debug.print("{}", x, ordered=True)  # <-

            @jax.pmap
            def step(x):
                show(x)
                jax.debug.callback(print, x, ordered=True)  # <-
                return x
        """)

    def test_on_one_device_or_without_order_it_is_right(self):
        self.found("""
            @jax.jit
            def on_one_device(x):
                jax.debug.print("{}", x, ordered=True)

            @jax.pmap
            def step(x):
                jax.debug.print("{}", x)
                jax.debug.print("{}", x, ordered=False)
                return x
        """)


class TestForkLoader:
    def found(self, text):
        assert_marked("fork-loader", "from torch.utils.data import DataLoader\n" + text)

    @pytest.mark.parametrize("workers", ["4", "args.workers", "os.cpu_count()"])
    def test_forked_workers(self, workers):
        self.found(f"loader = DataLoader(data, num_workers={workers})  # <-")

    @pytest.mark.parametrize(
        "arguments",
        [
            "batch_size=8",
            "num_workers=0",
            "num_workers=NONE",
            "num_workers=4, multiprocessing_context='spawn'",
            "num_workers=4, multiprocessing_context=context",
        ],
    )
    def test_none_or_spawned_workers(self, arguments):
        self.found(f"NONE = 0\nloader = DataLoader(data, {arguments})")

    def test_spawned_by_default(self):
        self.found(
            "import torch.multiprocessing as mp\n"
            "mp.set_start_method('spawn')\n"
            "loader = DataLoader(data, num_workers=4)"
        )

    def test_another_class_of_that_name(self):
        text = "from mydata import DataLoader\nloader = DataLoader(d, num_workers=4)"
        assert_marked("fork-loader", text)
