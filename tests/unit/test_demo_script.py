"""launch/demo.sh with a stand-in for python: it goes on where it stopped and does nothing twice."""

from __future__ import annotations

from tests.launcher_stand_in import Pipeline

DEMO = ["select-heads", "pairs", "pretrain_headrank.py", "export-hf", "select-heads", "export-hf", "rerank", "rerank", "rerank"]
DEMO_LAST = ["evaluate", "report", "view", "examples/demo_table.py"]


class TestDemo:
    """launch/demo.sh with the same stand-in; its report is made beside the viewer, so the last calls have no order."""

    def run(self, pipeline: Pipeline, **variables: str) -> list[str]:
        """The steps that were made, without the measures and reports, which always are."""
        code, made, said = pipeline.run(script="demo.sh", **{"HELD_OUT": "", **variables})
        assert code == 0, said
        steps = [kind for kind in made if kind not in DEMO_LAST]
        assert sorted(made[len(steps) :]) == sorted(DEMO_LAST)
        return steps

    def test_a_second_demo_does_nothing(self, pipeline):
        assert self.run(pipeline) == DEMO
        assert self.run(pipeline) == []

    def test_less_free_memory_is_no_other_demo_but_a_number_that_is_given_is(self, pipeline):
        pipeline.machine(cores=2, gigabytes=16)
        self.run(pipeline)
        assert "--nproc-per-node 2 " in pipeline.calls.read_text()
        pipeline.machine(cores=2, gigabytes=4)
        assert self.run(pipeline, TP="1") == [], "make demo always gives TP"
        assert "pretrain_headrank.py" in self.run(pipeline, NPROC="1")
        assert "--nproc-per-node 1 " in pipeline.calls.read_text()
        assert "pretrain_headrank.py" in self.run(pipeline, TP="2")
        assert "--nproc-per-node 2 " in pipeline.calls.read_text()

    def test_a_stopped_demo_goes_on_and_so_keeps_its_optimizer(self, pipeline):
        code, made, _ = pipeline.run(script="demo.sh", HELD_OUT="", STOP_EARLY="1")
        assert (code, made) == (3, DEMO[:3]) and "--no-save-optim" not in pipeline.calls.read_text()
        (pipeline.output / "round-1/train/state").write_text("a checkpoint")
        assert self.run(pipeline) == DEMO[2:]
        assert (pipeline.output / "round-1/train/state").read_text() == "a checkpoint"

    def test_other_heads_in_the_same_weights_are_reranked_again(self, pipeline):
        self.run(pipeline)
        config = (pipeline.output / "model/config.json").stat().st_mtime_ns
        assert self.run(pipeline, PRUNE="0.5") == ["select-heads", "select-heads", "export-hf", "rerank", "rerank"], (
            "ICR's, for CoRe's heads, and HeadRank's"
        )
        assert (pipeline.output / "model/config.json").stat().st_mtime_ns == config
        assert "--method headrank" in pipeline.calls.read_text()

    def test_more_queries_to_select_on_select_again(self, pipeline):
        self.run(pipeline)
        assert (pipeline.output / "selection.qids").read_text() == "q1\tfirst\nq3\tsecond\n"
        assert self.run(pipeline, SELECTION_PER_TOPIC="2")[:1] == ["select-heads"]
        assert (pipeline.output / "selection.qids").read_text() == "q1\tfirst\nq2\tfirst\nq3\tsecond\n"
        assert self.run(pipeline, SELECTION_PER_TOPIC="2") == []
        (pipeline.folder / "collection/qrels.txt").write_text("other\n")
        assert self.run(pipeline, SELECTION_PER_TOPIC="2")[:1] == ["select-heads"]

    def test_a_dry_run_writes_nothing(self, pipeline):
        code, made, said = pipeline.run(script="demo.sh", HELD_OUT="", DRY_RUN="1")
        assert (code, made) == (0, []) and "pretrain_headrank.py" in said and not pipeline.output.exists()

    def test_a_wrong_number_is_one_line(self, pipeline):
        code, made, said = pipeline.run(script="demo.sh", SELECTION_PER_TOPIC="0")
        assert (code, made) == (2, []) and said == "demo.sh: SELECTION_PER_TOPIC '0' is not a whole number of at least 1\n"
