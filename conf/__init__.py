"""The configuration: yaml files a group, the typed options behind them, and the check that nothing else is accepted.

Importing the package registers the option classes, so that `pkg://conf` composes for whoever asks.
"""

from conf.store import register

register()
