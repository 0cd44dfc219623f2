"""The control channel: who gets in, what is noticed on the way, what is agreed on, and when the other side is lost."""

import contextlib
import socket
import ssl
import threading
import time
from dataclasses import replace

import pytest
from pools import LONG, SECRET, TERMS, certificates, filled, staging, until

from oasis_hf.disagg import Control, Corrupt, DeadlineExceeded, PeerLost, PoolFull, PoolServer, Refused, StaleLease
from oasis_hf.disagg.channel import MAX_BODY, Calls, Channel, admit, greet, serve, soon
from oasis_hf.disagg.errors import DisaggError, again, packed, unpacked
from oasis_hf.disagg.wire import Wire, connect

READER = replace(TERMS, wire={"tcp": {}})


@pytest.fixture(scope="module")
def pool():
    pool = staging(64)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def server(pool):
    with PoolServer(pool, SECRET, TERMS) as server:
        yield server


@pytest.fixture(scope="module")
def brief():
    """A server whose leases, and whose patience with silent readers, last two seconds."""
    pool = staging(64, ttl=2.0, quarantine=0.2)
    with PoolServer(pool, SECRET, TERMS, silence=2.0) as server:
        yield server
    pool.close()


@contextlib.contextmanager
def control(server, terms=READER, secret=SECRET, engine="tcp", **kwargs):
    one = Control(server.address, secret, terms, engine, **kwargs)
    yield one
    one.close()


@pytest.fixture
def pair():
    """Two channels that share a session's keys, over a wire that nobody watches."""
    a, b = socket.socketpair()
    wires = Wire(a, "the server"), Wire(b, "the client")
    done = []
    thread = threading.Thread(target=lambda: done.append(admit(wires[1], SECRET, soon(LONG))))
    thread.start()
    client = greet(wires[0], SECRET, soon(LONG))
    thread.join()
    yield client, done[0]
    for wire in wires:
        wire.close()


class Tapped:
    """A wire that keeps what is written instead of sending it."""

    name, tls = "the tap", False

    def __init__(self):
        self.bytes = bytearray()

    def write(self, views, until=None, silence=None):
        for view in views:
            self.bytes += view


def test_frames_arrive_whole_and_in_order(pair):
    client, server = pair
    client.send({"op": "a"}, (b"123", b"", bytearray(100_000)))
    client.send({"op": "b", "text": "ü"})
    header, parts = server.receive(soon(LONG))
    assert header == {"op": "a"} and [len(part) for part in parts] == [3, 0, 100_000] and parts[0] == b"123"
    assert server.receive(soon(LONG)) == ({"op": "b", "text": "ü"}, [])
    server.send({"answer": 1})
    assert client.receive(soon(LONG))[0] == {"answer": 1}


def sent(channel, *frames):
    """The bytes of frames that were not sent after all."""
    wire, channel.wire = channel.wire, Tapped()
    out = []
    for header, parts in frames:
        channel.wire.bytes.clear()
        channel.send(header, parts)
        out.append(bytes(channel.wire.bytes))
    channel.wire = wire
    return out


@pytest.mark.parametrize("at", [14, 30, 100, -33, -1])
def test_a_changed_frame_is_refused_wherever_it_was_changed(pair, at):
    client, server = pair
    (frame,) = sent(client, ({"op": "release", "request": "somebody's"}, (bytes(100),)))
    frame = bytearray(frame)
    frame[at] ^= 1
    client.wire.write([memoryview(frame)])
    with pytest.raises(Refused, match="changed, injected or sent again") as error:
        server.receive(soon(LONG))
    assert error.value.what == "authentication"
    with pytest.raises(PeerLost):  # nothing that follows is listened to
        server.receive(soon(LONG))


def test_replayed_dropped_swapped_and_reflected_frames_are_refused(pair):
    client, server = pair
    frames = sent(client, ({"op": "a"}, ()), ({"op": "b"}, ()))
    client.wire.write([memoryview(frames[0])])
    assert server.receive(soon(LONG))[0] == {"op": "a"}
    client.wire.write([memoryview(frames[0])])  # again
    with pytest.raises(Refused, match="sent again"):
        server.receive(soon(LONG))


def test_a_frame_that_was_left_out_is_noticed(pair):
    client, server = pair
    client.wire.write([memoryview(sent(client, ({"op": "a"}, ()), ({"op": "b"}, ()))[1])])
    with pytest.raises(Refused, match="changed, injected"):
        server.receive(soon(LONG))


def test_a_frame_sent_back_to_its_sender_is_noticed(pair):
    client, server = pair
    (frame,) = sent(client, ({"op": "a"}, ()))
    server.wire.write([memoryview(frame)])
    with pytest.raises(Refused, match="changed, injected"):
        client.receive(soon(LONG))


def test_sessions_have_keys_of_their_own():
    keys = set()
    for _ in range(2):
        a, b = socket.socketpair()
        done = []
        thread = threading.Thread(target=lambda b=b, done=done: done.append(admit(Wire(b, "b"), SECRET, soon(LONG))))
        thread.start()
        client = greet(Wire(a, "a"), SECRET, soon(LONG))
        thread.join()
        assert client.keys == done[0].keys[::-1]
        keys |= set(client.keys)
    assert len(keys) == 4


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "too large"),
        (b"\0\0\0\2\0\0\0\0\0\0\0\0[]", "makes no sense"),
        (b"\0\0\0\x05\0\0\0\0\0\0\0\0hello", "makes no sense"),
        (b"\0\0\0\x10\0\0\0\0\0\0\0\x02" + b'{"parts":[1, 2]}' + b"ab", "makes no sense"),
        (b"\0\0\x0f\xff\0\0\0\0\0\0\0\0" + b"[" * 4095, "makes no sense"),
    ],
)
def test_nonsense_ends_the_connection(raw, message):
    a, b = socket.socketpair()
    channel = Channel(Wire(b, "somebody"), None, 4096, 64)
    a.sendall(raw)
    with pytest.raises(Refused, match=message) as error:
        channel.receive(soon(LONG))
    assert error.value.what == "frame"
    a.close()


def test_who_has_proved_nothing_gets_no_memory(server):
    """Before the proof a frame is small, whatever it says; the server goes on."""
    with socket.create_connection(server.address, 5) as sock:
        sock.sendall((100).to_bytes(4, "big") + MAX_BODY.to_bytes(8, "big"))
        sock.settimeout(LONG)
        assert sock.recv(10) == b""  # it does not wait for the rest
    with control(server) as one:
        assert one.stats()["capacity"] == 64


def test_another_secret_is_refused_by_the_server(server):
    with pytest.raises(Refused, match="secrets of the two sides differ") as error:
        Control(server.address, b"another secret of sixteen bytes or more", READER, "tcp")
    assert error.value.what == "authentication"


def test_a_server_that_does_not_know_the_secret_is_refused():
    a, b = socket.socketpair()

    def impostor():
        channel = Channel(Wire(b, "x"), None, 4096, 0)
        channel.receive(soon(LONG))
        channel.send({"nonce": "00" * 32})
        channel.receive(soon(LONG))
        channel.send({"proof": "00" * 32})

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(Refused, match="does not know the shared secret"):
        greet(Wire(a, "the pool"), SECRET, soon(LONG))
    thread.join()


def test_another_protocol_is_named():
    a, b = socket.socketpair()
    Channel(Wire(a, "a"), None).send({"protocol": 99, "nonce": "00" * 32})
    with pytest.raises(Refused, match="protocol 1, the other 99"):
        admit(Wire(b, "b"), SECRET, soon(LONG))


def test_a_short_secret_is_no_secret(server):
    with pytest.raises(ValueError, match="at least 16 bytes"):
        Control(server.address, b"hunter2", READER, "tcp")


@pytest.mark.parametrize(
    "terms, engine, what, message",
    [
        (replace(READER, version="0.0.9"), "tcp", "version", "'0.1.0' on the pool's side, '0.0.9' on the reader's"),
        (replace(READER, model="other"), "tcp", "model", "'tiny' on the pool's side, 'other'"),
        (replace(READER, layout={"page_bytes": 8192, "dtype": "float32"}), "tcp", "layout", "'page_bytes': 4096"),
        (replace(READER, layout={"page_bytes": 4096}), "tcp", "layout", "'dtype': 'float32' .* None on the reader"),
        (READER, "nixl", "engine", r"offers the engines \['tcp'\], not 'nixl'"),
        (replace(READER, wire={"tcp": {"segment": 1}}), "tcp", "wire", "'segment': None on the pool's side, 1"),
    ],
)
def test_what_differs_is_refused_and_named(server, terms, engine, what, message):
    with pytest.raises(Refused, match=message) as error:
        Control(server.address, SECRET, terms, engine)
    assert error.value.what == what


def test_nothing_is_answered_before_both_sides_agree(server):
    channel = greet(connect(server.address), SECRET, soon(LONG))
    channel.send({"op": "control"})
    calls = Calls(channel)
    with pytest.raises(Refused, match="'handle' came before the two sides agreed"):
        calls.call("handle", request="r")
    with pytest.raises(Refused, match="'hello' is not understood: KeyError"):
        calls.call("hello")
    calls.close()


def test_unknown_calls_and_wrong_fields_are_refused_and_the_channel_lives(server):
    with control(server) as one:
        for fields, message in (({}, "KeyError 'request'"), ({"request": "r", "generation": "x"}, "ValueError")):
            with pytest.raises(Refused, match=message):
                one._calls.call("renew", **fields)
        with pytest.raises(Refused, match="There is no call 'dance'"):
            one._calls.call("dance", request="r", generation=1)
        assert one.terms == server.terms and one.lost is None


def test_it_listens_on_loopback_unless_told(server):
    assert server.address[0] == "127.0.0.1" and server.data_address == server.address


def test_nobody_there_is_lost_and_nobody_answering_a_deadline():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            Control(mute.getsockname(), SECRET, READER, "tcp", seconds=0.3)
        assert time.monotonic() - began < 8  # the default is 10
    with socket.socket() as deaf:  # its port is nobody else's meanwhile
        deaf.bind(("127.0.0.1", 0))
        with pytest.raises(PeerLost, match="Nobody answers at"):
            Control(deaf.getsockname(), SECRET, READER, "tcp")


def quiet(sock, stop):
    """A server that admits and then says nothing."""
    with sock.accept()[0] as one:
        admit(Wire(one, "a reader"), SECRET, soon(LONG))
        stop.wait(LONG)


def test_silence_is_a_lost_peer_and_is_told_at_once():
    stop, told = threading.Event(), []
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=quiet, args=(sock, stop))
        thread.start()
        channel = greet(connect(sock.getsockname()), SECRET, soon(LONG))
        began = time.monotonic()
        calls = Calls(channel, beat=0.1, silence=0.4, on_lost=told.append)
        future = calls.begin("anything")
        with pytest.raises(PeerLost, match=r"silent for 0\.4 s"):
            future.result(LONG)
        assert time.monotonic() - began > 0.2
        until(lambda: told)
        with pytest.raises(PeerLost):
            calls.call("anything")
        assert told == [calls.lost]
        stop.set()
        thread.join()


def test_a_call_that_takes_too_long_is_a_deadline_and_the_channel_lives(pair):
    client, server = pair
    slow = threading.Event()

    def handler(op, header, parts):
        if op == "slow":
            slow.wait(LONG)
        if op == "full":
            raise PoolFull(9, 1, 2, 10, 3)
        return {"op": op}, parts

    def run():
        with contextlib.suppress(DisaggError):
            serve(server, handler, None, beat=0.1)

    thread = threading.Thread(target=run)
    thread.start()
    calls = Calls(client, beat=0.1, silence=1.5)
    with pytest.raises(DeadlineExceeded, match=r"'slow' within 2 s"):
        calls.call("slow", seconds=2)  # longer than the silence that is suffered: the other side beats meanwhile
    slow.set()
    assert calls.call("echo", (b"abc",), LONG) == ({"op": "echo", "id": 2}, [b"abc"])
    with pytest.raises(PoolFull, match=r"9 pages are needed, 1 of 10 are free \(3 requests hold pages; 2 pages wait"):
        calls.call("full")
    calls.close()
    thread.join(LONG)
    assert not thread.is_alive()


def test_errors_survive_the_way():
    for error in (Refused("layout", "No."), PoolFull(1, 2, 3, 4, 5), StaleLease("Gone."), Corrupt("Bad.")):
        for copy in (unpacked(packed(error)), again(error)):
            assert type(copy) is type(error) and str(copy) == str(error) and copy is not error
    assert unpacked(packed(Refused("layout", "No."))).what == "layout"
    assert unpacked({"kind": "OSError", "args": []}).args[0].startswith("The other side reported")
    assert type(unpacked(None)) is DisaggError


def test_a_handle_comes_as_published_with_a_lease_that_the_heartbeat_renews(brief):
    pool, handle = brief.staging, bytes(range(256)) * 20_000
    _, generation, _ = filled(pool, "long", 3, handle)
    with control(brief, beat=0.1) as one:
        got, lease = one.handle("long")
        assert got == handle and lease.generation == generation and (lease.ttl, lease.grace) == (2.0, 0.2)
        first = lease.until
        time.sleep(2.4)  # longer than a lease, and than the silence that the server suffers
        lease.check()
        assert lease.until > first + 1 and pool.stats()["published"] == 1
        one.renew(lease)
        one.release(lease)
        assert pool.free == pool.capacity
        with pytest.raises(StaleLease):
            lease.check()
        with pytest.raises(StaleLease, match="'long'"):
            one.handle("long")
        with pytest.raises(StaleLease):
            one.renew(lease)


def test_a_lease_that_ended_on_the_other_side_ends_here(brief):
    _, generation, _ = filled(brief.staging, "short", 3)
    with control(brief, beat=0.1) as one:
        _, lease = one.handle("short")
        brief.staging.release("short", generation)
        until(lambda: lease.until < 0)  # at the next renewal
        with pytest.raises(StaleLease):
            lease.check()


def test_a_changed_handle_is_corrupt(pool):
    class Liar(PoolServer):
        def _answer(self, op, header, parts):
            fields, answer = super()._answer(op, header, parts)
            return fields, ([b"other bytes"] if op == "handle" else answer)

    _, generation, _ = filled(pool, "x", 1)
    with Liar(pool, SECRET, TERMS) as server, control(server) as one:
        with pytest.raises(Corrupt, match="'x' differs"):
            one.handle("x")
        with pytest.raises(StaleLease, match="no published request 'y'"):
            one.handle("y")
    pool.release("x", generation, clean=True)


def test_tls_lets_only_those_in_whom_the_authority_knows(pool, tmp_path):
    tls, other = certificates(tmp_path), certificates(tmp_path, "other")
    with PoolServer(pool, SECRET, TERMS, tls=tls) as server:
        with control(server, tls=tls) as one:
            assert one.stats()["page_bytes"] == 4096
        with pytest.raises(DisaggError):
            Control(server.address, SECRET, READER, "tcp", tls=other, seconds=3)
        with pytest.raises(DisaggError):
            Control(server.address, SECRET, READER, "tcp", seconds=3)
        with pytest.raises(Refused) as error:
            Control(server.address, b"another secret of 16 bytes", READER, "tcp", tls=tls)
        assert error.value.what == "authentication"
        assert tls.context(True).minimum_version == ssl.TLSVersion.TLSv1_3
    with pytest.raises(OSError):
        PoolServer(pool, SECRET, TERMS, tls=replace(tls, cert="nowhere.pem"))
