"""Graph breaks: a step that cannot be captured whole is captured in parts.

In front of the instruction that stops a capture, the graph so far is compiled and its effects are made. The instruction
then runs natively, in a frame of its own function, and what follows it is captured as a part of its own.

    suspension.py   where a capture stopped, and the frames as they are in front of that instruction
    liveness.py     which variables of a frame are still needed
    code.py         code objects that enter a function in the middle
    drive.py        what runs between two parts
"""
