"""Authorization: every API with each permission alone."""

import asyncio
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from headrace.broker.access.users import GUEST
from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import VERSIONS, Api
from headrace.wire.kafka.schema import request_entity
from tests.listeners.kafka.logins import add, allow, logged_in
from tests.listeners.kafka.test_every_version import FILLED, TOPIC, only_known
from tests.listeners.kafka.world import Client, World, batch

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOPIC_REFUSED, GROUP_REFUSED = Code.TOPIC_AUTHORIZATION_FAILED, Code.GROUP_AUTHORIZATION_FAILED
CLUSTER_REFUSED, ID_REFUSED = Code.CLUSTER_AUTHORIZATION_FAILED, Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
REFUSALS = {TOPIC_REFUSED, GROUP_REFUSED, CLUSTER_REFUSED, ID_REFUSED}
READ, WRITE, CONFIGURE, ANY = {"read"}, {"write"}, {"configure"}, {"read", "write", "configure"}
NONE: set[str] = set()  # no permission is enough

# The single permission that each API needs, and its error code without it.
NEEDED: dict[Api, tuple[set[str], Code]] = {
    Api.PRODUCE: (WRITE, TOPIC_REFUSED),
    Api.FETCH: (READ, TOPIC_REFUSED),
    Api.LIST_OFFSETS: (READ, TOPIC_REFUSED),
    Api.OFFSET_FOR_LEADER_EPOCH: (READ, TOPIC_REFUSED),
    Api.DESCRIBE_PRODUCERS: (READ, TOPIC_REFUSED),
    Api.METADATA: (CONFIGURE, TOPIC_REFUSED),  # it names new topics
    Api.DESCRIBE_TOPIC_PARTITIONS: (ANY, TOPIC_REFUSED),
    Api.CREATE_TOPICS: (CONFIGURE, TOPIC_REFUSED),
    Api.DELETE_TOPICS: (CONFIGURE, TOPIC_REFUSED),
    Api.CREATE_PARTITIONS: (CONFIGURE, TOPIC_REFUSED),
    Api.DELETE_RECORDS: (CONFIGURE, TOPIC_REFUSED),
    Api.DESCRIBE_CONFIGS: (ANY, TOPIC_REFUSED),
    Api.ALTER_CONFIGS: (CONFIGURE, TOPIC_REFUSED),
    Api.INCREMENTAL_ALTER_CONFIGS: (CONFIGURE, TOPIC_REFUSED),
    Api.FIND_COORDINATOR: (READ, GROUP_REFUSED),
    Api.JOIN_GROUP: (READ, GROUP_REFUSED),
    Api.SYNC_GROUP: (READ, GROUP_REFUSED),
    Api.HEARTBEAT: (READ, GROUP_REFUSED),
    Api.LEAVE_GROUP: (READ, GROUP_REFUSED),
    Api.DESCRIBE_GROUPS: (READ, GROUP_REFUSED),
    Api.DELETE_GROUPS: (READ, GROUP_REFUSED),
    Api.OFFSET_COMMIT: (READ, TOPIC_REFUSED),
    Api.OFFSET_FETCH: (READ, GROUP_REFUSED),
    Api.OFFSET_DELETE: (READ, GROUP_REFUSED),
    Api.CONSUMER_GROUP_HEARTBEAT: (READ, GROUP_REFUSED),
    Api.CONSUMER_GROUP_DESCRIBE: (READ, GROUP_REFUSED),
    Api.SHARE_GROUP_HEARTBEAT: (READ, GROUP_REFUSED),
    Api.SHARE_GROUP_DESCRIBE: (READ, GROUP_REFUSED),
    Api.SHARE_FETCH: (READ, GROUP_REFUSED),
    Api.SHARE_ACKNOWLEDGE: (READ, GROUP_REFUSED),
    Api.DESCRIBE_SHARE_GROUP_OFFSETS: (READ, GROUP_REFUSED),
    Api.ALTER_SHARE_GROUP_OFFSETS: (READ, GROUP_REFUSED),
    Api.DELETE_SHARE_GROUP_OFFSETS: (READ, GROUP_REFUSED),
    Api.INIT_PRODUCER_ID: (WRITE, ID_REFUSED),
    Api.ADD_PARTITIONS_TO_TXN: (WRITE, ID_REFUSED),
    Api.ADD_OFFSETS_TO_TXN: (NONE, ID_REFUSED),  # write on the id, read on the group
    Api.TXN_OFFSET_COMMIT: (NONE, TOPIC_REFUSED),  # the same, and read on the topic
    Api.END_TXN: (WRITE, ID_REFUSED),
    Api.DESCRIBE_TRANSACTIONS: (WRITE, ID_REFUSED),
    Api.UNREGISTER_BROKER: (NONE, CLUSTER_REFUSED),
    Api.DESCRIBE_QUORUM: (NONE, CLUSTER_REFUSED),
    Api.UPDATE_FEATURES: (NONE, CLUSTER_REFUSED),
    Api.DESCRIBE_LOG_DIRS: (NONE, CLUSTER_REFUSED),
    Api.ALTER_REPLICA_LOG_DIRS: (NONE, CLUSTER_REFUSED),
    Api.ELECT_LEADERS: (NONE, CLUSTER_REFUSED),
    Api.ALTER_PARTITION_REASSIGNMENTS: (NONE, CLUSTER_REFUSED),
    Api.LIST_PARTITION_REASSIGNMENTS: (NONE, CLUSTER_REFUSED),
    Api.LIST_CONFIG_RESOURCES: (NONE, CLUSTER_REFUSED),
    Api.DESCRIBE_CLIENT_QUOTAS: (NONE, CLUSTER_REFUSED),
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS: (NONE, CLUSTER_REFUSED),
    Api.ALTER_USER_SCRAM_CREDENTIALS: (NONE, CLUSTER_REFUSED),
}
FREE = {
    *(Api.API_VERSIONS, Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE, Api.DESCRIBE_CLUSTER),
    *(Api.GET_TELEMETRY_SUBSCRIPTIONS, Api.PUSH_TELEMETRY, Api.DESCRIBE_ACLS, Api.CREATE_ACLS, Api.DELETE_ACLS),
    Api.DESCRIBE_DELEGATION_TOKEN,
}
LISTS = {Api.LIST_GROUPS, Api.LIST_TRANSACTIONS}  # they omit resources without permission
BY_NAME = {Api.FETCH: 12, Api.OFFSET_COMMIT: 9, Api.OFFSET_FETCH: 9}  # the last versions with topic names
# Requests of FILLED that need another permission, too.
ASKED: dict[Api, dict[str, Any]] = {
    Api.DESCRIBE_CONFIGS: {"resources": [{"resource_type": 2, "resource_name": TOPIC, "configuration_keys": None}]},
    Api.DELETE_TOPICS: {"topics": [{"name": "gone"}]},
    Api.METADATA: {"topics": [{"name": "made by metadata"}, {"name": "automatic"}], "allow_auto_topic_creation": True},
    Api.ALTER_USER_SCRAM_CREDENTIALS: {"deletions": [{"name": "root", "mechanism": 1}]},
    Api.SHARE_GROUP_HEARTBEAT: {"group_id": "s", "member_id": "m", "subscribed_topic_names": [TOPIC]},
}


async def prepare(world: World) -> None:
    await world.topic(TOPIC)
    await add(world, "root", tags="administrator")
    await add(world, "ann", permission=None)
    await world.broker.users.remove_user(GUEST)


@pytest_asyncio.fixture(loop_scope="module")
async def root(world: World) -> Client:
    return await logged_in(world, "root")


@pytest_asyncio.fixture(loop_scope="module")
async def ann(world: World) -> Client:
    return await logged_in(world, "ann")


def codes(answer: Any) -> Iterator[int]:
    """Every error code in a response, recursively."""
    if isinstance(answer, list):
        for one in answer:
            yield from codes(one)
    elif isinstance(answer, SimpleNamespace):
        for name, value in vars(answer).items():
            if name.endswith("error_code"):
                yield value
            else:
                yield from codes(value)


async def ask(client: Client, api: Api, version: int | None = None) -> set[int]:
    version = BY_NAME.get(api, VERSIONS[api].highest) if version is None else version
    fields = only_known(request_entity(api, version), {**FILLED.get(api, {}), **ASKED.get(api, {})})
    return set(codes(await client.call(api, version, **fields)))


def end_of(world: World, topic: str = TOPIC) -> int:
    return int(world.broker.streams.get(topic).partitions[0].log.visible_end)


async def test_every_api_is_refused_without_permission_and_changes_nothing(world: World, ann: Client) -> None:
    assert NEEDED.keys() | FREE | LISTS == VERSIONS.keys(), "add the new API to the table"
    before = end_of(world), sorted(world.broker.streams.names("/"))
    for api, (_, code) in NEEDED.items():
        found = await ask(ann, api)
        assert code in found, (api, found)
        assert found <= REFUSALS | {0, Code.INVALID_TOPIC}, (api, found)  # 0: of the whole response
    assert (end_of(world), sorted(world.broker.streams.names("/"))) == before
    assert world.context.coordination.groups.listing() == []


async def test_every_version_reports_a_refusal(world: World, ann: Client, caplog: pytest.LogCaptureFixture) -> None:
    await allow(world, "ann")
    before = end_of(world), sorted(world.broker.streams.names("/"))
    for api in NEEDED:
        for version in range(3 if api is Api.PRODUCE else VERSIONS[api].lowest, VERSIONS[api].highest + 1):
            allowed = {code for code in await ask(ann, api, version) if code not in REFUSALS}
            # Some have no place for an error, and unknown topic ids need no permission.
            assert allowed <= {0, Code.INVALID_TOPIC, Code.UNKNOWN_TOPIC_ID}, (api, version, allowed)
    assert (end_of(world), sorted(world.broker.streams.names("/"))) == before
    assert [one for one in caplog.records if one.levelname == "ERROR"] == []


@pytest.mark.parametrize("right", ["read", "write", "configure"])
async def test_each_permission_allows_the_apis_in_the_table(world: World, ann: Client, right: str) -> None:
    await allow(world, "ann", **{right: ".*"})
    for api, (enough, _) in NEEDED.items():
        if api is Api.DELETE_TOPICS and "gone" not in world.broker.streams.names("/"):
            await world.topic("gone")
        refused = REFUSALS & await ask(ann, api)
        assert bool(refused) == (right not in enough), (api, right, refused)


async def test_broker_apis_need_an_administrator(world: World, root: Client) -> None:
    for api, (_, code) in NEEDED.items():
        if code == CLUSTER_REFUSED:
            assert not REFUSALS & await ask(root, api), api
    for kind in (4, 8, 16):
        resource: dict[str, object] = {"resource_type": kind, "resource_name": "1", "configs": []}
        await allow(world, "ann", read=".*", write=".*", configure=".*")
        ann = await logged_in(world, "ann")
        answer = await ann.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource])
        assert answer.responses[0].error_code == CLUSTER_REFUSED
    answer = await ann.call(
        Api.DESCRIBE_CONFIGS, 4, resources=[{"resource_type": 4, "resource_name": "1", "configuration_keys": None}]
    )
    assert answer.results[0].error_code == CLUSTER_REFUSED


async def test_refused_partitions_of_a_produce_are_not_stored_and_the_others_are(world: World, ann: Client) -> None:
    await world.topic("mine")
    await allow(world, "ann", write="^mine$")
    before = end_of(world)
    answer = await ann.call(
        Api.PRODUCE,
        9,
        acks=-1,
        timeout=1000,
        topic_data=[
            {"name": topic, "partition_data": [{"index": 0, "records": bytes(batch(b"a"))}]}
            for topic in (TOPIC, "mine", "nowhere")
        ],
    )
    found = {one.name: one.partition_responses[0].error_code for one in answer.responses}
    assert found == {TOPIC: TOPIC_REFUSED, "mine": 0, "nowhere": TOPIC_REFUSED}, (
        "it does not reveal whether the topic exists"
    )
    assert (end_of(world), end_of(world, "mine")) == (before, 1)


async def test_a_revoked_permission_is_gone_with_the_next_request(world: World, ann: Client) -> None:
    await allow(world, "ann", write="t", read="t")
    assert (await ann.produce(TOPIC, batch(b"a"))).error_code == 0
    await allow(world, "ann", read="t")
    before = end_of(world)
    assert (await ann.produce(TOPIC, batch(b"b"))).error_code == TOPIC_REFUSED
    assert end_of(world) == before
    assert (await ann.fetch(TOPIC)).error_code == 0
    await world.broker.users.clear_permission("/", "ann")
    assert (await ann.fetch(TOPIC)).error_code == TOPIC_REFUSED
    await allow(world, "ann", write="t")
    assert (await ann.produce(TOPIC, batch(b"b"))).error_code == 0


async def test_a_waiting_fetch_does_not_return_topics_whose_permission_was_revoked(
    world: World, ann: Client, root: Client
) -> None:
    await allow(world, "ann", read="t")
    fetch = asyncio.ensure_future(ann.fetch(TOPIC, end_of(world), max_wait=60_000))
    while not any(found.fetch_waiters for found in world.listener.connections):
        await asyncio.sleep(0.01)
    await allow(world, "ann", write="t")
    assert (await root.produce(TOPIC, batch(b"not for you"))).error_code == 0
    answer = await fetch
    assert (answer.error_code, answer.records) == (TOPIC_REFUSED, b"")


async def test_lists_include_only_permitted_resources(world: World, ann: Client, root: Client) -> None:
    for name in ("seen", "hidden"):
        await world.topic(f"{name}-topic")
        await root.call(
            Api.OFFSET_COMMIT,
            2,
            group_id=f"{name}-group",
            generation_id_or_member_epoch=-1,
            topics=[{"name": f"{name}-topic", "partitions": [{"partition_index": 0, "committed_offset": 0}]}],
        )
        await root.call(Api.INIT_PRODUCER_ID, 1, transactional_id=f"{name}-id", transaction_timeout=1000)
    await allow(world, "ann", read="^seen", write="^seen-id$")
    assert [one.name for one in (await ann.call(Api.METADATA, 9, topics=None)).topics] == ["seen-topic"]
    pages = await ann.call(Api.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[], response_partition_limit=100)
    assert [one.name for one in pages.topics] == ["seen-topic"]
    assert [one.group_id for one in (await ann.call(Api.LIST_GROUPS, 4)).groups] == ["seen-group"]
    listed = await ann.call(Api.LIST_TRANSACTIONS, 1)
    assert [one.transactional_id for one in listed.transaction_states] == ["seen-id"]
    await allow(world, "ann", read="group$", write="")
    answer = await ann.call(Api.OFFSET_FETCH, 8, groups=[{"group_id": "seen-group", "topics": None}])
    assert answer.groups[0].topics == [], "offsets of topics without permission are omitted"


async def test_topic_ids_are_authorized_by_the_topics_name(world: World, ann: Client) -> None:
    topic_id = world.context.topics.id_of(world.broker.streams.get(TOPIC))
    await allow(world, "ann")
    wanted = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}
    topics = [{"topic_id": topic_id, "partitions": [wanted]}]
    answer = await ann.call(Api.FETCH, 15, topics=topics, session_epoch=-1)
    assert answer.responses[0].partitions[0].error_code == TOPIC_REFUSED
    described = (await ann.call(Api.METADATA, 12, topics=[{"topic_id": topic_id}])).topics[0]
    assert (described.error_code, described.name) == (TOPIC_REFUSED, None), "its name is not revealed"
    gone = (await ann.call(Api.DELETE_TOPICS, 6, topics=[{"topic_id": topic_id}])).responses[0]
    assert (gone.error_code, gone.name) == (TOPIC_REFUSED, None)
    await allow(world, "ann", read="t")
    answer = await ann.call(Api.FETCH, 15, topics=topics, session_epoch=-1)
    assert answer.responses[0].partitions[0].error_code == 0


async def test_a_transactional_batch_needs_the_permission_on_its_producers_transactional_id(
    world: World, ann: Client, root: Client
) -> None:
    """Regardless of the id in the request: knowing a producer id must not be enough to write as that producer."""
    made = await root.call(Api.INIT_PRODUCER_ID, 1, transactional_id="roots", transaction_timeout=60_000)
    await root.call(
        Api.ADD_PARTITIONS_TO_TXN,
        3,
        v3_and_below_transactional_id="roots",
        v3_and_below_producer_id=made.producer_id,
        v3_and_below_producer_epoch=made.producer_epoch,
        v3_and_below_topics=[{"name": TOPIC, "partitions": [0]}],
    )
    await allow(world, "ann", write="^(t|anns)$")
    data = batch(
        b"x", producer_id=made.producer_id, producer_epoch=made.producer_epoch, base_sequence=0, transactional=True
    )
    before = end_of(world)
    for version, transactional_id in product((9, 12), ("anns", "roots", None)):
        answer = await ann.call(
            Api.PRODUCE,
            version,
            transactional_id=transactional_id,
            acks=-1,
            timeout=1000,
            topic_data=[{"name": TOPIC, "partition_data": [{"index": 0, "records": bytes(data)}]}],
        )
        assert answer.responses[0].partition_responses[0].error_code == ID_REFUSED
    assert end_of(world) == before
    ended = await root.call(
        Api.END_TXN,
        3,
        transactional_id="roots",
        producer_id=made.producer_id,
        producer_epoch=made.producer_epoch,
        committed=False,
    )
    assert ended.error_code == 0


async def test_permission_on_a_group_does_not_include_its_topics(world: World, ann: Client) -> None:
    await allow(world, "ann", read="^g$")
    topics = [{"name": TOPIC, "partitions": [{"partition_index": 0, "committed_offset": 1}]}]
    fields = {"group_id": "g", "generation_id_or_member_epoch": -1, "topics": topics}
    answer = await ann.call(Api.OFFSET_COMMIT, 8, **fields)
    assert answer.topics[0].partitions[0].error_code == TOPIC_REFUSED
    assert world.context.coordination.groups.offsets.get("g", TOPIC, 0) is None
    asked = {"group_id": "c", "member_id": "m", "subscribed_topic_names": [TOPIC], "rebalance_timeout": 1000}
    await allow(world, "ann", read="^c$")
    assert (await ann.call(Api.CONSUMER_GROUP_HEARTBEAT, 1, **asked)).error_code == TOPIC_REFUSED


async def test_permission_on_topics_does_not_include_a_group(world: World, ann: Client, root: Client) -> None:
    topics = [{"name": TOPIC, "partitions": [{"partition_index": 0, "committed_offset": 1}]}]
    await root.call(Api.OFFSET_COMMIT, 8, group_id="theirs", generation_id_or_member_epoch=-1, topics=topics)
    await root.call(Api.INIT_PRODUCER_ID, 1, transactional_id="anns", transaction_timeout=1000)
    await allow(world, "ann", read="^t$", write="^anns$")
    moved = [{"name": TOPIC, "partitions": [{"partition_index": 0, "committed_offset": 0}]}]
    fields: dict[str, Any] = {"group_id": "theirs", "topics": moved}
    answer = await ann.call(Api.OFFSET_COMMIT, 8, generation_id_or_member_epoch=-1, **fields)
    assert answer.topics[0].partitions[0].error_code == GROUP_REFUSED
    answer = await ann.call(Api.TXN_OFFSET_COMMIT, 3, transactional_id="anns", **fields)
    assert answer.topics[0].partitions[0].error_code == GROUP_REFUSED
    kept = world.context.coordination.groups.offsets.get("theirs", TOPIC, 0)
    assert kept is not None and kept.offset == 1
    wanted = {"group_id": "theirs", "topics": [{"name": TOPIC, "partition_indexes": [0]}]}
    for version in (1, 7):
        answer = await ann.call(Api.OFFSET_FETCH, version, **wanted)
        assert answer.topics[0].partitions[0].error_code == GROUP_REFUSED
        assert answer.topics[0].partitions[0].committed_offset == -1
    await allow(world, "ann", read="^theirs$")
    gone = [{"name": TOPIC, "partitions": [{"partition_index": 0}]}]
    answer = await ann.call(Api.OFFSET_DELETE, 0, group_id="theirs", topics=gone)
    assert answer.topics[0].partitions[0].error_code == TOPIC_REFUSED
    assert world.context.coordination.groups.offsets.get("theirs", TOPIC, 0) == kept


async def test_transactions_are_visible_to_users_who_may_write_to_them(world: World, ann: Client, root: Client) -> None:
    made = await root.call(Api.INIT_PRODUCER_ID, 1, transactional_id="open", transaction_timeout=60_000)
    who = {"producer_id": made.producer_id, "producer_epoch": made.producer_epoch}
    await root.call(
        Api.ADD_PARTITIONS_TO_TXN,
        3,
        v3_and_below_transactional_id="open",
        v3_and_below_topics=[{"name": TOPIC, "partitions": [0]}],
        **{f"v3_and_below_{name}": value for name, value in who.items()},
    )
    await allow(world, "ann", read=".*")
    for version, fields in ((3, {"key": "open"}), (4, {"coordinator_keys": ["open"]})):
        found = set(codes(await ann.call(Api.FIND_COORDINATOR, version, key_type=1, **fields)))
        assert ID_REFUSED in found
    await allow(world, "ann", write="^open$")
    assert set(codes(await ann.call(Api.FIND_COORDINATOR, 4, key_type=1, coordinator_keys=["open"]))) == {0}
    [state] = (await ann.call(Api.DESCRIBE_TRANSACTIONS, 0, transactional_ids=["open"])).transaction_states
    assert (state.error_code, state.topics) == (0, []), "topics without permission are omitted"
    assert (await ann.call(Api.END_TXN, 3, transactional_id="open", committed=False, **who)).error_code == 0


async def test_a_share_group_member_gets_no_topic_that_it_may_not_read(world: World, ann: Client, root: Client) -> None:
    await world.topic("shared")
    topic_id = world.context.topics.id_of(world.broker.streams.get("shared"))
    await allow(world, "ann", read="^(shared|anns)$")
    member = {"group_id": "anns", "member_id": "AAAAAAAAAAAAAAAAAAAAAA"}
    joined = await ann.call(Api.SHARE_GROUP_HEARTBEAT, 1, **member, subscribed_topic_names=["shared"])
    assert joined.error_code == 0
    await root.produce("shared", batch(b"a", b"b"))
    limits = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1000, "max_records": 1, "batch_size": 1}
    topics = [{"topic_id": topic_id, "partitions": [{"partition_index": 0, "acknowledgement_batches": []}]}]
    first = await ann.call(Api.SHARE_FETCH, 1, **member, **limits, share_session_epoch=0, topics=topics)
    assert first.responses[0].partitions[0].acquired_records[0].first_offset == 0
    await allow(world, "ann", read="^anns$")
    said = [{"first_offset": 0, "last_offset": 0, "acknowledge_types": [1]}]
    topics = [{"topic_id": topic_id, "partitions": [{"partition_index": 0, "acknowledgement_batches": said}]}]
    answer = await ann.call(Api.SHARE_FETCH, 1, **member, **limits, share_session_epoch=1, topics=topics)
    [part] = answer.responses[0].partitions
    assert (part.error_code, part.acknowledge_error_code, part.records) == (TOPIC_REFUSED, TOPIC_REFUSED, b"")
    await ann.call(Api.SHARE_GROUP_HEARTBEAT, 1, **member, member_epoch=-1)
    moved = [{"topic_name": "shared", "partitions": [{"partition_index": 0, "start_offset": 2}]}]
    altered = await ann.call(Api.ALTER_SHARE_GROUP_OFFSETS, 0, group_id="anns", topics=moved)
    [topic] = altered.responses
    assert (topic.partitions[0].error_code, topic.topic_id) == (TOPIC_REFUSED, bytes(16))
    gone = await ann.call(Api.DELETE_SHARE_GROUP_OFFSETS, 0, group_id="anns", topics=[{"topic_name": "shared"}])
    assert gone.responses[0].error_code == TOPIC_REFUSED
    [group] = (
        await ann.call(Api.DESCRIBE_SHARE_GROUP_OFFSETS, 0, groups=[{"group_id": "anns", "topics": None}])
    ).groups
    assert (group.error_code, group.topics) == (0, [])
    [group] = (
        await root.call(Api.DESCRIBE_SHARE_GROUP_OFFSETS, 0, groups=[{"group_id": "anns", "topics": None}])
    ).groups
    assert [one.topic_name for one in group.topics] == ["shared"], "it is there"


async def test_group_configs_need_read_to_describe_and_configure_to_alter(world: World, ann: Client) -> None:
    await allow(world, "ann", read="^anns$", configure="^theirs$")
    change = [{"name": "share.auto.offset.reset", "config_operation": 0, "value": "earliest"}]
    for name, described, altered in (("anns", 0, GROUP_REFUSED), ("theirs", GROUP_REFUSED, 0)):
        asked = [{"resource_type": 32, "resource_name": name, "configuration_keys": None}]
        answer = await ann.call(Api.DESCRIBE_CONFIGS, 4, resources=asked)
        assert answer.results[0].error_code == described
        asked = [{"resource_type": 32, "resource_name": name, "configs": change}]
        answer = await ann.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=asked)
        assert answer.responses[0].error_code == altered


async def test_a_subscription_pattern_matches_only_readable_topics(world: World, ann: Client) -> None:
    for topic in ("p-read", "p-written", "p-hidden"):
        await world.topic(topic)
    await allow(world, "ann", read="^(p-read|p-group)$", write="^p-written$")
    fields: dict[str, Any] = {"group_id": "p-group", "member_id": "m", "rebalance_timeout": 1000}
    first = {**fields, "subscribed_topic_regex": "p-.*", "topic_partitions": []}
    answer = await ann.call(Api.CONSUMER_GROUP_HEARTBEAT, 1, **first)
    wanted = world.context.topics.id_of(world.broker.streams.get("p-read"))
    assert [one.topic_id for one in answer.assignment.topic_partitions] == [wanted]
    await allow(world, "ann", read="^(p-read|p-written|p-group)$")
    answer = await ann.call(Api.CONSUMER_GROUP_HEARTBEAT, 1, **{**fields, "member_epoch": answer.member_epoch})
    assert len(answer.assignment.topic_partitions) == 2, "with the permissions as of now"


async def test_a_refusal_is_logged_once(world: World, ann: Client, caplog: pytest.LogCaptureFixture) -> None:
    await allow(world, "ann")
    for _ in range(3):
        assert (await ann.produce(TOPIC, batch(b"a"))).error_code == TOPIC_REFUSED
    said = [one.getMessage() for one in caplog.records if "no permission to write topic 't'" in one.getMessage()]
    assert len(said) == 1 and "user 'ann'" in said[0]
