from .compression import read_yoochoose as read_yoochoose
