"""Heartbeats: a busy rank sends them, a stopped one does not, and the reason is reported once."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading

from outrider.workers.transport.socket_channel import Monitor, beat

RANK = """
import socket, sys, threading
from outrider.workers.transport import socket_channel
socket_channel.BEAT_S = 0.02
socket_channel.beat(socket.socket(fileno=int(sys.argv[1])), threading.Event())
"""


def test_a_stopped_process_is_noticed_and_a_busy_one_is_not():
    lost: queue.Queue[str] = queue.Queue()
    ours, ranks = [], []
    for _ in range(2):
        mine, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        command = [sys.executable, "-c", RANK, str(theirs.fileno())]
        ranks.append(subprocess.Popen(command, close_fds=False))
        theirs.close()
        mine.recv(1)  # it has begun
        ours.append(mine)
    monitor = Monitor(ours, 3.0, lost.put)
    try:
        threading.Event().wait(0.2)
        assert lost.empty()
        ranks[1].send_signal(signal.SIGSTOP)
        assert lost.get(timeout=60).startswith("rank 1 has sent no heartbeat for ")
        assert lost.empty()
    finally:
        monitor.close()
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_a_closed_connection_is_a_loss_at_once_and_a_closed_monitor_reports_nothing():
    lost: queue.Queue[str] = queue.Queue()
    mine, theirs = socket.socketpair()
    Monitor([mine], 1000.0, lost.put)
    theirs.close()
    assert lost.get(timeout=60) == "rank 0 has closed its connection"
    mine, theirs = socket.socketpair()
    monitor = Monitor([mine], 1000.0, lost.put)
    monitor.close()
    stopped = threading.Event()
    beating = threading.Thread(target=beat, args=(theirs, stopped))
    beating.start()
    beating.join(60)  # the monitor has hung up
    assert not beating.is_alive()
    assert lost.empty()
