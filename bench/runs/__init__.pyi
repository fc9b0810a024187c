from .feed import feed as feed
from .quickstart import quickstart as quickstart
from .quickstart import repeat as repeat
from .receipt import receipt as receipt
