"""Runs ctl from a checkout: python main.py --config=experiments/mnist.py."""

from ctl.main import console

if __name__ == "__main__":
    console()
