"""keep_zombies.py: 100 times a second, fork a child that exits immediately, and reap it 0.2 s later."""

import os
import time
from collections import deque

children: deque[int] = deque()
while True:
    if (child := os.fork()) == 0:
        os._exit(0)
    children.append(child)
    if len(children) > 20:
        os.waitpid(children.popleft(), 0)
    time.sleep(0.01)
