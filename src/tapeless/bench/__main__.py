"""A contender's process (worker.py), started as a command of ours is."""

from tapeless.start import raise_gc_threshold

if __name__ == "__main__":
    raise_gc_threshold()
    from tapeless.bench.worker import main

    main()
