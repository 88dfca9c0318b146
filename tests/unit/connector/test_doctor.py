import dataclasses
import json
import os

from test_identity import IDENTITY

from sparkcache_connector import cli
from sparkcache_connector.doctor import examine
from sparkcache_connector.store import Store
from sparkcache_connector.store.manifest import GroupKind
from sparkcache_connector.store.publication import GroupPages
from sparkcache_connector.telemetry.health import Health, HealthPage

A, B = b"a" * 32, b"b" * 32
ONE_RANK = dataclasses.replace(IDENTITY, tensor_parallel=1)


def describe(root, identity, when=1):
    path = root / "identities" / f"{identity.digest().hex()}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(identity.to_bytes())
    os.utime(path, (when, when))


def publish(root, identity, *contexts):
    place = root / f"rank-{identity.rank}"
    with Store.open(place, identity=identity.digest(), rank=identity.rank) as store:
        for context in contexts:
            pages = GroupPages(GroupKind.FULL_ATTENTION, 4096, 0, [os.urandom(4096)])
            store.publish(context, 256, [pages])


def test_machine_where_everything_hits_has_no_findings(tmp_path):
    describe(tmp_path, ONE_RANK)
    publish(tmp_path, ONE_RANK, A, B)
    diagnosis = examine(tmp_path)
    assert (diagnosis.common, diagnosis.findings) == (2, ())
    assert list(diagnosis.as_text())[-1] == "nothing here keeps requests from hitting"


def test_changed_identity_is_named_field_by_field(tmp_path):
    other = dataclasses.replace(ONE_RANK, model_dtype="bfloat16")
    describe(tmp_path, ONE_RANK, when=1)
    describe(tmp_path, other, when=2)
    publish(tmp_path, ONE_RANK, A)
    findings = examine(tmp_path).findings
    assert "the engine that started last has another identity than the 1 roots" in findings[0]
    assert findings[1] == '  model_dtype: "float32" -> "bfloat16"'
    assert len(findings) == 2


def test_rank_that_lacks_roots_of_the_others_is_named(tmp_path):
    ranks = [IDENTITY, dataclasses.replace(IDENTITY, rank=1)]
    for identity in ranks:
        describe(tmp_path, identity)
    publish(tmp_path, ranks[0], A, B)
    publish(tmp_path, ranks[1], A)
    diagnosis = examine(tmp_path)
    assert diagnosis.common == 1
    assert diagnosis.findings == ("rank-1: lacks 1 roots that other ranks hold; none is offered",)


def test_ranks_of_other_machines_are_counted(tmp_path):
    describe(tmp_path, IDENTITY)
    publish(tmp_path, IDENTITY, A)
    assert examine(tmp_path).findings == ("1 of 2 ranks have their cache roots elsewhere",)


def test_empty_directory_store_without_roots_and_unreadable_root_are_told_apart(tmp_path):
    assert "is this the engine's spark_cache_root?" in examine(tmp_path).findings[0]
    describe(tmp_path, ONE_RANK)
    publish(tmp_path, ONE_RANK)
    assert "nothing is stored yet" in examine(tmp_path).findings[0]
    (tmp_path / "rank-0").chmod(0o777)
    assert "rank-0: cache root" in examine(tmp_path).findings[0]


def test_damaged_description_of_an_identity_is_ignored(tmp_path):
    describe(tmp_path, ONE_RANK)
    (tmp_path / "identities" / "x.json").write_text("{")
    publish(tmp_path, ONE_RANK, A)
    assert examine(tmp_path).findings == ()


def test_command_prints_one_page_or_json_and_refuses_what_is_not_there(tmp_path, capsys):
    describe(tmp_path, ONE_RANK)
    publish(tmp_path, ONE_RANK, A)
    assert cli.main(["doctor", str(tmp_path)]) == 0
    assert "roots on every rank: 1" in capsys.readouterr().out
    assert cli.main(["doctor", str(tmp_path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["roots_on_every_rank"] == 1
    assert cli.main(["doctor", str(tmp_path / "gone")]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_what_the_last_engine_said_of_itself_is_told_first(tmp_path):
    describe(tmp_path, ONE_RANK)
    publish(tmp_path, ONE_RANK, A)
    page = HealthPage(tmp_path / "health" / "rank-0.json")
    failures = {"restores": {"deadline": 2, "page-mismatch": 1}, "roots": {}}
    page.write(Health(pid=1, off={"publish": "disk-full"}, failures=failures))
    page.close()
    diagnosis = examine(tmp_path)
    assert diagnosis.findings == (
        "rank-0: publish is off (the last engine, now ended): disk-full",
        "rank-0: restores that failed (the last engine, now ended): 2 deadline, 1 page-mismatch",
    )
    (state,) = diagnosis.as_json()["ranks"]
    assert (state["off"], state["failures"]) == ({"publish": "disk-full"}, failures)


def test_running_engine_is_named_by_its_process(tmp_path):
    describe(tmp_path, ONE_RANK)
    page = HealthPage(tmp_path / "health" / "rank-0.json")
    page.write(Health(pid=os.getpid(), off={"restore": "weights_changed"}))
    page.close()
    place, identity = tmp_path / "rank-0", ONE_RANK.digest()
    with Store.open(place, identity=identity, rank=0):
        found = examine(tmp_path).findings
    assert found[0] == f"rank-0: restore is off (engine {os.getpid()}): weights_changed"
