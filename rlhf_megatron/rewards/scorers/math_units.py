"""Words that stand behind numbers: units, things that problems count, powers of ten; and words
that are mathematics.
"""

from __future__ import annotations

# With an "s" behind them, too. A single letter may be a variable, and is not here.
_UNITS = (
    "mm cm dm km nm um µm hm mi ft yd inch inches foot feet yard mile meter metre kilometer"
    " kilometre centimeter centimetre millimeter millimetre decimeter decimetre mg kg gm gram"
    " gramme kilogram milligram ton tonne lb oz pound ounce ml cl dl mL dL kL liter litre"
    " milliliter millilitre gal gallon quart pint cup sec min hr yr second minute hour day week"
    " month year decade century millisecond ms km/h mph kmh kmph kph km/hr rpm Hz kHz MHz hertz"
    " Pa kPa atm bar joule kJ cal kcal calorie watt kW kWh MW volt mV kV amp ampere mA ohm kg"
    " newton kN mol kelvin celsius fahrenheit radian rad degree deg acre hectare ha sqft sqm cc"
    " mpg bit byte kB KB MB GB TB cent dollar euro rupee yen peso pence penny buck"
)
UNIT_NAMES = frozenset(
    name + ending for name in _UNITS.split() for ending in ("", "s")
) | frozenset({"centuries", "pennies", "am", "pm", "rs", "Rs", "USD", "EUR"})

_COUNTED = (
    "unit point way integer digit meal edge student people person child children man men woman"
    " women boy girl apple orange toy coin ticket tile soldier monkey multiple mark number item"
    " book page ball card game player team car step face vertices vertex side triangle square"
    " cube sq cubic linear solution root value pair term time round marble candy candies dog cat"
    " animal bird tree flower box egg cookie pie cake per of in each area volume speed"
)
COUNTED_WORDS = frozenset(
    word + ending for word in _COUNTED.split() for ending in ("", "s", "es")
) | frozenset({"total", "altogether", "more", "less", "left"})

_MATHEMATICS = (
    "and or mod gcd lcm max sup inf infinity sin cos tan cot sec csc arcsin arccos arctan sinh"
    " cosh tanh log ln lg exp sqrt pi percent percentage pct choose cup cap det lim"
)
MATH_WORDS = frozenset(_MATHEMATICS.split())

# math-verify reads them without a backslash.
KNOWN_WORDS = frozenset({"and", "or", "inf", "infinity", "percent", "percentage", "pct", "sqrt"})

_JOINING = "where if for in to with when is are then"
JOINING_WORDS = frozenset(_JOINING.split())  # no units, though they stand behind numbers

SCALE_WORDS = {
    "hundred": "\\times 100",
    "thousand": "\\times 10^{3}",
    "million": "\\times 10^{6}",
    "billion": "\\times 10^{9}",
    "trillion": "\\times 10^{12}",
    "dozen": "\\times 12",
}

_UP_TO_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen twenty"
)
_TENS = "ten twenty thirty forty fifty sixty seventy eighty ninety hundred"
NUMBER_WORDS = {word: value for value, word in enumerate(_UP_TO_TWENTY.split())} | {
    word: 10 * value for value, word in enumerate(_TENS.split(), start=1)
}
