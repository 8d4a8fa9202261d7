"""What processes of one job tell each other beside the tensors of a step: plain values, strictly decoded, sealed with its key.

    form.py       values as bytes and back, by their declared type; nothing in a message can be run
    seal.py       the job's key, and what it is put to
    exchange.py   from every rank to every rank, and from the first rank to all
    meeting.py    between hosts that have yet to meet

Nothing is unpickled that came from another process.
"""
