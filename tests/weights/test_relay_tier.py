import asyncio
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp
from urllib.parse import unquote

import pytest
from aiohttp import ClientPayloadError, ClientSession

from streamrl.schemas.control import AnnouncedWeights
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.topics import CONTROL
from streamrl.schemas.weights import BELOW, DIRECTORY, MANIFEST, WeightManifest
from streamrl.weights.fetch import WeightsFetcher
from streamrl.weights.relay.copies import VersionCopy
from tests.progress import patience, within
from tests.weights.relay_host import beats, network

FIRST, SECOND = PolicyVersion(1, 1), PolicyVersion(1, 2)
MIB = 1 << 20


async def test_a_version_goes_down_the_chain_and_every_byte_crosses_each_link_once(tmp_path: Path) -> None:
    content = os.urandom(5 * MIB + 17)
    async with network(tmp_path, 4, store_pace=16 * MIB) as net:
        await net.announce(net.write(FIRST, content))
        await net.hosts[3].until_it_has(FIRST, MIB)  # the last has begun ...
        assert not net.hosts[0].is_whole(FIRST)  # ... before the first is done
        await net.whole(FIRST)
        for number in range(1, 5):
            assert (tmp_path / f"h{number}" / "1-1" / "model.safetensors").read_bytes() == content
        ideal = 4 * len(content)
        assert ideal <= net.received <= 1.1 * ideal
        # The store sent it once, and whoever is behind the first relay was never the store's affair.
        assert len(content) <= net.store.sent <= 1.1 * len(content)


async def test_a_dead_relay_is_routed_around_in_the_middle_of_a_transfer(tmp_path: Path) -> None:
    content = os.urandom(8 * MIB)
    async with network(tmp_path, 4, store_pace=8 * MIB) as net:
        await net.announce(net.write(FIRST, content))
        killed = net.hosts[1]
        await killed.until_it_has(FIRST, 4 * MIB)
        before = {host.tier.me.relay_id: host.have(FIRST) for host in net.hosts}
        await killed.kill()
        assert 0 < before["h3"] < len(content)
        await net.whole(FIRST, but=(killed,))
        for number in (1, 3, 4):
            assert (tmp_path / f"h{number}" / "1-1" / "model.safetensors").read_bytes() == content
        # Its successor asked the one before it for the rest, and not for what it had.
        survivors = [host for host in net.hosts if host is not killed]
        received = sum(host.received for host in survivors)
        assert received <= 1.1 * len(survivors) * len(content)
        assert net.store.sent <= 1.1 * len(content)


async def test_damage_is_found_at_once_and_only_verified_chunks_are_forwarded(tmp_path: Path) -> None:
    content = os.urandom(3 * MIB)
    async with network(tmp_path, 2) as net:
        ready = net.write(FIRST, content)
        # In the second chunk of what the store sends; the manifest was written before.
        path = tmp_path / "store" / "1-1" / "model.safetensors"
        damaged = bytearray(content)
        damaged[MIB + 5] ^= 1
        path.write_bytes(damaged)
        await net.announce(ready)
        async with patience(10):
            while not all(host.have(FIRST) == MIB for host in net.hosts):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert [host.have(FIRST) for host in net.hosts] == [MIB, MIB]
        path.write_bytes(content)
        await net.whole(FIRST)
        assert (tmp_path / "h2" / "1-1" / "model.safetensors").read_bytes() == content


async def test_deltas_travel_the_same_way(tmp_path: Path) -> None:
    content = os.urandom(2 * MIB)
    changed = bytearray(content)
    changed[::50_000] = bytes(len(changed[::50_000]))
    async with network(tmp_path, 3) as net:
        await net.announce(net.write(FIRST, content))
        await net.whole(FIRST)
        before = net.received
        await net.announce(net.write(SECOND, bytes(changed), base=FIRST))
        await net.whole(SECOND)
        assert net.received - before < 3 * MIB // 10
        for number in (1, 2, 3):
            assert (tmp_path / f"h{number}" / "1-2" / "model.safetensors").read_bytes() == changed


async def test_a_copy_is_whole_or_incoming_and_a_faster_worker_reads_what_arrives(tmp_path: Path) -> None:
    content = os.urandom(2 * MIB)
    async with network(tmp_path, 1, store_pace=8 * MIB) as net, ClientSession() as session:
        ready = net.write(FIRST, content)
        # Asked before the relay has read the announcement.
        url = f"{net.hosts[0].tier.me.address}/weights/1-1/model.safetensors"
        asked = asyncio.create_task(session.get(url, headers={"Range": "bytes=100-"}))
        await asyncio.sleep(0.05)
        await net.announce(ready)
        async with await asked as response:
            assert (response.status, net.hosts[0].is_whole(FIRST)) == (206, False)
            assert await response.read() == content[100:]


async def test_workers_of_a_host_map_the_files_of_its_relay_once_it_has_them(tmp_path: Path) -> None:
    content = os.urandom(4 * MIB)
    async with network(tmp_path, 1, store_pace=4 * MIB) as net:
        host = net.hosts[0]
        ready = net.write(FIRST, content).replace(relays=(host.tier.me.address,))
        await net.announce(ready)
        await host.until_it_has(FIRST, MIB)
        workers = [WeightsFetcher(tmp_path / "workers", timeout_s=5.0) for _ in range(2)]
        fetched = await asyncio.gather(*(worker.fetch(ready) for worker in workers))
        assert set(fetched) == {tmp_path / "workers" / "1-1"}
        mine, theirs = (path / "model.safetensors" for path in (fetched[0], tmp_path / "h1" / "1-1"))
        assert os.path.samestat(mine.stat(), theirs.stat())
        assert mine.read_bytes() == content
        assert host.sent < 1000  # the manifest


async def test_leased_versions_are_kept_and_unread_ones_deleted(tmp_path: Path) -> None:
    async with network(tmp_path, 1) as net:
        copies = net.hosts[0].relay.copies
        assert copies is not None
        for number in (1, 2):
            await net.announce(net.write(PolicyVersion(1, number), os.urandom(1000)))
            await net.whole(PolicyVersion(1, number))
        with copies.lease(copies.versions[FIRST]):
            for number in (3, 4):
                await net.announce(net.write(PolicyVersion(1, number), os.urandom(1000)))
                await net.whole(PolicyVersion(1, number))
            await copies.tidy()
            assert [version.number for version in copies.whole()] == [1, 3, 4]
        await copies.tidy()
        assert [version.number for version in copies.whole()] == [3, 4]


async def test_copies_belong_to_one_run(tmp_path: Path) -> None:
    for run, number in (("one", 9), ("two", 1)):
        version, content = PolicyVersion(1, number), os.urandom(1000)
        async with network(tmp_path, 1) as net:
            # What another run of this name left would pass for newer; announced before the identity is read, as well.
            await net.announce(net.write(version, content))
            await net.identify(run)
            await net.whole(version)
            copies = net.hosts[0].relay.copies
            assert copies is not None
            async with patience(5):
                while copies.whole() != [version]:
                    await asyncio.sleep(0.01)
            await copies.tidy()
            assert sorted(path.name for path in copies.root.iterdir()) == [".run", str(version)]
            assert (copies.root / str(version) / "model.safetensors").read_bytes() == content
        shutil.rmtree(tmp_path / "store")


async def test_a_relay_that_lives_on_takes_the_weights_of_the_next_run(tmp_path: Path) -> None:
    async with network(tmp_path, 1) as net:
        copies, log = net.hosts[0].relay.copies, net.bus.log(CONTROL.full_name("r")).partitions[0]
        assert copies is not None
        await net.identify("one")
        await net.announce(net.write(PolicyVersion(1, 9), os.urandom(1000)))
        await net.whole(PolicyVersion(1, 9))
        await net.identify("two")
        await net.announce(net.write(FIRST, os.urandom(1000)))
        # The topic was made anew: nothing of the other run is on it.
        log[:2] = [record._replace(offset=offset) for offset, record in enumerate(log[2:])]
        await net.whole(FIRST)
        await net.announce(net.write(SECOND, os.urandom(1000)))
        await net.whole(SECOND)
        assert copies.whole() == [FIRST, SECOND]


async def test_a_version_of_another_run_that_came_half_is_not_waited_for(tmp_path: Path) -> None:
    """Its store went at the end of its run; the next run's numbers are smaller for long."""
    async with network(tmp_path, 1, store_pace=4 * MIB) as net:
        host, log = net.hosts[0], net.bus.log(CONTROL.full_name("r")).partitions[0]
        await net.identify("one")
        await net.announce(net.write(PolicyVersion(1, 9), os.urandom(8 * MIB)))
        await host.until_it_has(PolicyVersion(1, 9), MIB)
        await net.store.kill()
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "store").mkdir()
        await net.store.start()
        await net.identify("two")
        await net.announce(net.write(FIRST, os.urandom(1000)))
        log[:2] = [record._replace(offset=offset) for offset, record in enumerate(log[2:])]
        await net.whole(FIRST)


async def test_a_reader_that_asked_for_the_directory_and_left_is_not_waited_for(tmp_path: Path) -> None:
    async with network(tmp_path, 1) as net:
        raw = (net.root / "store").joinpath("1-1", MANIFEST)
        net.write(FIRST, os.urandom(1000))
        copies = net.hosts[0].relay.copies
        assert copies is not None
        copy = copies.begin(WeightManifest.model_validate_json(raw.read_bytes()), raw.read_bytes())
        url = f"{net.hosts[0].tier.me.address}/weights/1-1/{DIRECTORY}"
        async with ClientSession() as session, session.get(url) as response:
            assert unquote(response.headers[BELOW]) == str(copies.root)
            assert copy.readers == 1
        async with patience(5):
            while copy.readers:
                await asyncio.sleep(0.01)
        assert not copy.ended.is_set()


async def test_a_worker_that_cannot_map_the_files_of_its_relay_reads_what_arrives(tmp_path: Path) -> None:
    cache, content = Path(mkdtemp(prefix="streamrl-test-", dir="/dev/shm")), os.urandom(6 * MIB)
    assert cache.stat().st_dev != tmp_path.stat().st_dev
    try:
        async with network(tmp_path, 1, store_pace=2 * MIB) as net:
            host = net.hosts[0]
            ready = net.write(FIRST, content).replace(relays=(host.tier.me.address,))
            await net.announce(ready)
            await host.until_it_has(FIRST, MIB)
            fetching = asyncio.create_task(WeightsFetcher(cache, timeout_s=5.0).fetch(ready))
            async with patience(10):
                while not sum(path.stat().st_size for path in cache.rglob("model.safetensors")):
                    await asyncio.sleep(0.01)
            assert not host.is_whole(FIRST)
            assert (await fetching / "model.safetensors").read_bytes() == content
    finally:
        shutil.rmtree(cache)


async def test_readers_of_an_abandoned_version_are_notified(tmp_path: Path) -> None:
    async with network(tmp_path, 1) as net, ClientSession() as session:
        raw = (net.root / "store").joinpath("1-1", MANIFEST)
        net.write(FIRST, os.urandom(2 * MIB))
        copies, url = net.hosts[0].relay.copies, f"{net.hosts[0].tier.me.address}/weights/1-1/model.safetensors"
        assert copies is not None
        copy = copies.begin(WeightManifest.model_validate_json(raw.read_bytes()), raw.read_bytes())
        arriving = copy.files["model.safetensors"]
        arriving.resume()
        with (net.root / "store" / "1-1" / "model.safetensors").open("rb") as file:
            arriving.arrived(arriving.append(memoryview(file.read(MIB)), "there"))
        async with session.get(url) as response:
            assert len(await response.content.readexactly(MIB)) == MIB
            assert copy.readers == 1
            copies.abandon(copy)
            with pytest.raises(ClientPayloadError):
                await within(response.read(), 10)
        assert copy.readers == 0


async def test_a_file_is_found_once_its_version_is_complete(tmp_path: Path) -> None:
    content = os.urandom(MIB)
    async with network(tmp_path, 1) as net, ClientSession() as session:
        ready, copies = net.write(FIRST, content), net.hosts[0].relay.copies
        assert copies is not None
        finish = copies.finish

        def finish_late(copy: VersionCopy) -> None:
            # Between the check of its last file and its name somebody asks; the answer begins behind the rename.
            asking.append(asyncio.create_task(ask()))
            asyncio.get_running_loop().call_later(0.05, finish, copy)

        async def ask() -> bytes:
            async with session.get(f"{net.hosts[0].tier.me.address}/weights/1-1/model.safetensors") as response:
                assert response.status == 200
                return await response.read()

        asking: list[asyncio.Task[bytes]] = []
        copies.finish = finish_late  # type: ignore[method-assign]
        await net.announce(ready)
        await net.whole(FIRST)
        assert await asking[0] == content


async def test_a_whole_copy_that_was_deleted_at_once_is_not_found(tmp_path: Path) -> None:
    async with network(tmp_path, 1) as net, ClientSession() as session:
        await net.announce(net.write(FIRST, os.urandom(1000)))
        await net.whole(FIRST)
        copies = net.hosts[0].relay.copies
        assert copies is not None
        shutil.rmtree(copies.root / str(FIRST))
        async with session.get(f"{net.hosts[0].tier.me.address}/weights/1-1/model.safetensors") as response:
            assert (response.status, "no 'model.safetensors'" in await response.text()) == (404, True)


async def test_a_relay_says_what_it_holds_and_that_it_leaves(tmp_path: Path) -> None:
    async with network(tmp_path, 1) as net:
        await net.announce(net.write(FIRST, os.urandom(1000)))
        await net.whole(FIRST)
        await asyncio.sleep(0.1)
        last = [beat for beat in beats(net.bus) if beat.relay_id == "h1"][-1]
        assert (last.held, last.has_store, last.leaving) == ((FIRST,), False, False)
    last = [beat for beat in beats(net.bus) if beat.relay_id == "h1"][-1]
    assert last.leaving


async def test_weights_of_an_arm_go_down_the_same_chain_and_every_byte_crosses_each_link_once(tmp_path: Path) -> None:
    content, of_arm = os.urandom(MIB), os.urandom(3 * MIB + 5)
    async with network(tmp_path, 3) as net, ClientSession() as session:
        await net.split(rloo=0.5)
        # Of the same number as the served policy's, and other weights.
        await net.announce(net.write(FIRST, content))
        await net.announce(net.write_of_arm("rloo", FIRST, of_arm))
        await net.whole(FIRST, arm="rloo")
        await net.whole(FIRST)
        for host in net.hosts:
            for path, expected in (("weights", content), ("arms/rloo/weights", of_arm)):
                async with session.get(f"{host.tier.me.address}/{path}/1-1/model.safetensors") as response:
                    assert (response.status, await response.read() == expected) == (200, True)
        both = len(content) + len(of_arm)
        assert 3 * both <= net.received <= 1.1 * 3 * both
        async with patience(5):
            while not any(beat.held_of_arms == {"rloo": (FIRST,)} for beat in beats(net.bus) if beat.relay_id == "h3"):
                await asyncio.sleep(0.01)


async def test_a_worker_of_an_arm_reads_from_its_own_relay_what_arrives(tmp_path: Path) -> None:
    content = os.urandom(2 * MIB)
    async with network(tmp_path, 1, store_pace=8 * MIB) as net:
        ready = net.write_of_arm("rloo", FIRST, content)
        host = net.hosts[0]
        near = ready.replace(relays=(net.store.tier.me.address, host.tier.me.address), relay_hosts=("h0", "h1"))
        # It asks before the relay has heard of the split.
        fetcher = WeightsFetcher(tmp_path / "cache", host="h1")
        fetching = asyncio.create_task(fetcher.fetch(near))
        await asyncio.sleep(0.05)
        await net.split(rloo=1.0)
        await net.announce(ready)
        found = await fetching
        assert (found / "model.safetensors").read_bytes() == content
        assert net.store.sent <= 1.1 * len(content)  # to the relay, and not once more to the worker


async def test_deltas_of_arms_go_down_the_chain_and_lead_from_each_one_s_own_base(tmp_path: Path) -> None:
    """Served policy and two arms, of the same numbers and sizes; a worker at the last relay is of one, then another."""

    def changed(content: bytes, at: int) -> bytes:
        return content[:at] + os.urandom(100) + content[at + 100 :]

    arms = ("", "rloo", "long")
    first = {arm: os.urandom(2 * MIB) for arm in arms}
    second = {arm: changed(first[arm], 1000 * (place + 1)) for place, arm in enumerate(arms)}
    async with network(tmp_path, 2) as net:
        await net.split(rloo=0.3, long=0.3)
        last = net.hosts[-1].tier.me
        fetcher = WeightsFetcher(tmp_path / "cache", host="h2")
        for version, contents, base in ((FIRST, first, None), (SECOND, second, FIRST)):
            for arm in arms:
                ready: AnnouncedWeights = (
                    net.write_of_arm(arm, version, contents[arm], base)
                    if arm
                    else net.write(version, contents[arm], base)
                )
                await net.announce(ready)
                await net.whole(version, arm=arm)
                sent = net.hosts[-1].sent
                near = ready.replace(relays=(net.store.tier.me.address, last.address), relay_hosts=("h0", "h2"))
                found = await fetcher.fetch(near)
                assert (found / "model.safetensors").read_bytes() == contents[arm]
                # Of the second one a difference, from the host's own relay; it holds each policy's base.
                assert net.hosts[-1].sent - sent < (0.1 if base else 1.1) * len(contents[arm])
                fetcher.keep_only({version}, arm)


async def test_damaged_weights_of_an_arm_are_not_passed_on(tmp_path: Path) -> None:
    content = os.urandom(2 * MIB)
    async with network(tmp_path, 2) as net:
        ready = net.write_of_arm("rloo", FIRST, content)
        path = tmp_path / "instances" / "rloo" / "1-1" / "model.safetensors"
        path.write_bytes(content[:MIB] + bytes(MIB))
        await net.split(rloo=0.5)
        await net.announce(ready)
        async with patience(10):
            while not all(host.have(FIRST, "rloo") == MIB for host in net.hosts):
                await asyncio.sleep(0.01)
        assert not any(host.is_whole(FIRST, "rloo") for host in net.hosts)
        path.write_bytes(content)
        await net.whole(FIRST, arm="rloo")


async def test_only_leased_versions_of_a_former_arm_are_kept(tmp_path: Path) -> None:
    async with network(tmp_path, 1) as net:
        host = net.hosts[0]
        copies = host.relay.copies
        assert copies is not None
        await net.split(rloo=0.3, long=0.3)
        for arm in ("rloo", "long"):
            await net.announce(net.write_of_arm(arm, FIRST, os.urandom(1000)))
            await net.whole(FIRST, arm=arm)
        read = copies.series["rloo"]
        with read.lease(read.versions[FIRST]):
            await net.split()
            async with patience(5):
                while host.tier.followers:
                    await asyncio.sleep(0.01)
            await copies.tidy()
            assert sorted(path.name for path in (copies.root / "arms").iterdir()) == ["rloo"]
        await copies.tidy()
        assert (copies.series, list((copies.root / "arms").iterdir())) == ({}, [])
        # It may be one again.
        await net.split(rloo=0.3)
        await net.whole(FIRST, arm="rloo")


async def test_directories_of_current_arms_survive_a_restart_of_the_relay(tmp_path: Path) -> None:
    for arm in ("rloo", "long"):
        left = tmp_path / "h1" / "arms" / arm / ".incoming-1-1-0"
        left.mkdir(parents=True)
    async with network(tmp_path, 1) as net:
        copies = net.hosts[0].relay.copies
        assert copies is not None
        await copies.tidy()
        assert len(list((copies.root / "arms").iterdir())) == 2  # nobody has said yet which are arms
        await net.split(rloo=0.3)
        async with patience(5):
            while "rloo" not in copies.series:
                await asyncio.sleep(0.01)
        await copies.tidy()
        assert [path.name for path in (copies.root / "arms").iterdir()] == ["rloo"]
