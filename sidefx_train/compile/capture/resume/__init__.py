"""Graph breaks: a step that cannot be captured as one graph is captured in parts.

Before the instruction that stops a capture, the graph so far is compiled and its effects are applied. The instruction
then runs natively, in a frame of its own function, and the code after it is captured as another part.

    suspension.py        where a capture stopped, and the frames before that instruction
    liveness.py          variables of a frame that are still needed
    exception_stack.py   stack entries of exception handlers
    frame_layout.py      layout of a frame, and code that restores it
    bridge.py            one instruction as a function of a frame's state
    resume_function.py   code objects that enter a function in the middle
    native_generators.py interpreted generators continued as real ones
    driver.py            runs bridges and parts
"""
