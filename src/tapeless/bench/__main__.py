"""A contender's process (worker.py), started as a command of ours is."""

from tapeless.start import collect_seldom

if __name__ == "__main__":
    collect_seldom()
    from tapeless.bench.worker import main

    main()
