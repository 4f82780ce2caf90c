# ruff: noqa: E501, C408, D103, SIM905 (tables of words)
"""The vocabulary of the generated data: words, names, tables of facts. Everything here was written for this script."""

from __future__ import annotations

import random
import zlib


def held(key: str) -> bool:
    """True for the one content key in sixteen that training never sees (in the family that asks)."""
    return zlib.crc32(("manta:" + key).encode()) % 16 == 0


ANIMALS = """ant bear bee bird camel cat cow crab crow deer dog dolphin donkey duck eagle elephant falcon fish fox frog
goat goose hare hawk hedgehog horse kitten koala lamb lion lizard llama lynx mole monkey moose mouse octopus otter owl
ox panda parrot penguin pig pony puppy rabbit raven salmon seal shark sheep snail snake sparrow spider squirrel swan
tiger toad turkey turtle whale wolf worm zebra""".split()
FOODS = """apple apricot banana bean berry bread butter cabbage cake carrot celery cheese cherry cookie corn cream
cucumber date egg fig garlic grape honey jam leek lemon lentil lime mango melon milk mint mushroom noodle nut olive
onion orange pancake pasta pea peach pear pepper pickle pie pizza plum potato pumpkin radish rice salad salt sandwich
soup spinach sugar tea toast tomato turnip waffle walnut yogurt""".split()
OBJECTS = """bag ball basket bell bike blanket boat book bottle bowl box bridge brush bucket button camera candle car
card chair clock coat coin cup desk dish door drum engine fan feather flag flute fork glass glove guitar hammer hat
helmet jacket jar kettle key kite knife ladder lamp letter lock map mirror needle oven page paint paper pen pencil
piano picture pillow pin plane plate pocket pot ring rope ruler sail scarf shelf ship shirt shoe sock spoon stamp stone
string table tent ticket towel toy train truck umbrella vase violin wagon wallet watch wheel whistle window""".split()
NATURE = """beach branch bush cave cliff cloud coast desert dust field fire flower fog forest frost garden grass hail
hill ice island lake leaf lightning meadow moon mountain mud ocean path planet pond rain rainbow river road rock root
sand sea seed shadow shore sky snow spring star storm stream summer sun sunset swamp thunder tide tree valley village
water wave wind winter wood""".split()
ADJECTIVES = """ancient brave bright brown busy calm careful cheerful clean clever cold cool curious dark deep dry eager
early empty famous fast fine friendly funny gentle giant gold golden good grand great happy heavy honest huge humble
kind large late lazy light little lonely long loud lucky mild modern narrow neat new nice noisy odd old plain polite
proud quick quiet rare rich round safe sharp shiny short shy silent silly silver simple sleepy slow small smart smooth
soft strange strong sunny sweet tall tidy tiny warm wide wild wise wooden young""".split()
VERBS = """ask bake begin bring build buy call carry catch check choose climb close cook count cut dance dig draw dream
drive eat fall feed find fix fly fold follow give grow guess hear help hide hold jump keep kick know learn leave lift
listen look lose make measure meet mix move open order pack paint plan plant play pull push reach read rest ride run
save search see sell send share sing sit sleep smile solve speak stand start stay stop study swim take talk teach tell
think throw touch travel turn visit wait wake walk wash wear whisper win work write""".split()
NOUNS = """airport answer area arm artist baby baker bank birthday body brother captain chapter city class color
corner country cousin daughter doctor dollar dragon driver family farmer father finger friend future game guest hand
harbor heart history holiday home hospital hotel hour house idea job joke journey judge king kitchen knight lesson
library machine market memory message minute money month morning mother museum music neighbor night number nurse office
palace parent park party person pilot pirate place poem poet prince problem queen question reason robot roof room sailor
school science secret shop sister soldier song sound space sport station story street student summit system teacher
team temple theater tower town traveler uncle voice wall week wizard word world writer year strawberry banana computer
language network keyboard mississippi butterfly chocolate pineapple""".split()
COLORS = """red blue green yellow purple orange pink brown black white gray silver gold violet indigo teal crimson
turquoise beige maroon""".split()
COMMON = """which lives smallest jumps these assistant dollars about thousand smaller times briefly answer helpful functions object
capital result explain should sentence letters token string function cannot field words again title concise request required
opposite important password common built people comes reverse numbers largest digits appears please remember product knows
tasks every questions friendly nobody carried model works sorry first backwards thing morning there before uppercase hundred
thanks costs tokens likes access lives write because between different beautiful tomorrow yesterday always never banana
hello good bye yes no elephant giraffe kangaroo dinosaur lemonade umbrella holiday mathematics alphabet tennis football""".split()
WORDS = sorted(set(ANIMALS + FOODS + OBJECTS + NATURE + ADJECTIVES + VERBS + NOUNS + COLORS + COMMON))

NAMES = """Ada Adam Aisha Alan Alice Amara Amir Ana Andre Anton Arjun Ben Bianca Boris Bruno Carla Carlos Cecilia Chen
Chloe Clara Daniel Daria David Diana Diego Dora Elena Eli Elif Emil Emma Eric Esther Eva Fatima Felix Fiona Frank Freya
George Gina Grace Greta Hana Hannah Hassan Helen Henry Hugo Ian Ibrahim Ida Igor Ines Ingrid Irene Isaac Ivan Jack
Jade Jamal James Jana Jasper Joan Jonas Jorge Judith Julia Kai Karim Kate Kenji Kira Lara Laura Lena Leo Liam Lily Lina
Linus Lucas Lucia Luna Maia Malik Marco Maria Marta Max Maya Mei Mila Milo Mina Mira Mohamed Nadia Naomi Nico Nina Noah
Nora Olga Oliver Omar Oscar Otto Pablo Paul Pedro Petra Priya Quinn Rafael Ravi Rita Rosa Ruth Sam Samir Sara Sasha
Selma Simon Sofia Stella Sven Tara Theo Thomas Tim Tina Uma Vera Victor Viktor Wanda Wei Yara Yuki Yusuf Zane Zara
Zoe""".split()
SURNAMES = """Abbott Alvarez Baker Becker Brooks Castro Chan Cohen Costa Cruz Dahl Diaz Evans Fischer Flores Garcia
Grant Haddad Hansen Hill Ito Jensen Kaya Keller Khan Kim Kowalski Lee Lopez Mason Meyer Moreau Mori Nguyen Novak Okafor
Olsen Ortiz Park Patel Perez Quist Reed Rossi Sato Schmidt Silva Singh Stone Tan Torres Vega Wagner Weber Wolf Wong
Yilmaz Young""".split()

CAPITALS = dict(
    p.split(":")
    for p in """France:Paris;Germany:Berlin;Italy:Rome;Spain:Madrid;Portugal:Lisbon;England:London;Ireland:Dublin;
Scotland:Edinburgh;Norway:Oslo;Sweden:Stockholm;Denmark:Copenhagen;Finland:Helsinki;Iceland:Reykjavik;Poland:Warsaw;
Austria:Vienna;Hungary:Budapest;Greece:Athens;Turkey:Ankara;Russia:Moscow;Ukraine:Kyiv;Romania:Bucharest;Bulgaria:Sofia;
Serbia:Belgrade;Croatia:Zagreb;Belgium:Brussels;Switzerland:Bern;Egypt:Cairo;Kenya:Nairobi;Nigeria:Abuja;Ghana:Accra;
Ethiopia:Addis Ababa;Morocco:Rabat;Tunisia:Tunis;Senegal:Dakar;Uganda:Kampala;China:Beijing;Japan:Tokyo;India:New Delhi;
Thailand:Bangkok;Vietnam:Hanoi;Indonesia:Jakarta;Malaysia:Kuala Lumpur;Nepal:Kathmandu;Pakistan:Islamabad;
Iran:Tehran;Iraq:Baghdad;Canada:Ottawa;Mexico:Mexico City;Brazil:Brasilia;Argentina:Buenos Aires;Chile:Santiago;
Peru:Lima;Colombia:Bogota;Ecuador:Quito;Cuba:Havana;Uruguay:Montevideo;Australia:Canberra;New Zealand:Wellington;
South Korea:Seoul;the United States:Washington;the Philippines:Manila;the Netherlands:Amsterdam;
the Czech Republic:Prague""".replace("\n", "").split(";")
)
SYMBOLS = dict(
    p.split(":")
    for p in """hydrogen:H;helium:He;lithium:Li;carbon:C;nitrogen:N;oxygen:O;neon:Ne;sodium:Na;magnesium:Mg;aluminum:Al;
silicon:Si;sulfur:S;chlorine:Cl;potassium:K;calcium:Ca;iron:Fe;nickel:Ni;copper:Cu;zinc:Zn;silver:Ag;tin:Sn;gold:Au;
mercury:Hg;lead:Pb;uranium:U""".replace("\n", "").split(";")
)
OPPOSITES = dict(
    p.split(":")
    for p in """hot:cold;big:small;up:down;left:right;day:night;black:white;open:closed;fast:slow;happy:sad;rich:poor;
old:young;early:late;full:empty;hard:soft;light:dark;loud:quiet;near:far;wet:dry;high:low;long:short;strong:weak;
clean:dirty;good:bad;inside:outside;first:last;true:false;above:below;deep:shallow;wide:narrow;sharp:dull""".replace(
        "\n", ""
    ).split(";")
)
SOUNDS = dict(
    p.split(":")
    for p in """cat:meow;dog:woof;cow:moo;sheep:baa;pig:oink;duck:quack;horse:neigh;lion:roar;owl:hoot;bee:buzz;
snake:hiss;mouse:squeak;frog:ribbit;crow:caw;wolf:howl;donkey:hee-haw;turkey:gobble;rooster:cock-a-doodle-doo""".replace(
        "\n", ""
    ).split(";")
)
LEGS = dict(cat=4, dog=4, horse=4, cow=4, bird=2, duck=2, ant=6, bee=6, spider=8, snake=0, crab=10, fish=0, frog=4)
BABIES = dict(
    p.split(":")
    for p in "cat:kitten;dog:puppy;cow:calf;horse:foal;sheep:lamb;goat:kid;lion:cub;duck:duckling;frog:tadpole;deer:fawn;kangaroo:joey;goose:gosling;swan:cygnet".split(
        ";"
    )
)
SPANISH = dict(
    p.split(":")
    for p in """cat:gato;dog:perro;house:casa;water:agua;sun:sol;moon:luna;book:libro;bread:pan;milk:leche;red:rojo;
blue:azul;green:verde;friend:amigo;school:escuela;table:mesa;night:noche;day:dia;fire:fuego;tree:arbol;sea:mar""".replace(
        "\n", ""
    ).split(";")
)
FRENCH = dict(
    p.split(":")
    for p in """cat:chat;dog:chien;house:maison;water:eau;sun:soleil;moon:lune;book:livre;bread:pain;milk:lait;red:rouge;
blue:bleu;green:vert;friend:ami;school:ecole;table:table;night:nuit;day:jour;fire:feu;tree:arbre;sea:mer""".replace(
        "\n", ""
    ).split(";")
)
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = dict(zip(MONTHS, [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], strict=True))
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
CONTINENTS = {
    "Europe": "France Germany Italy Spain Portugal Norway Sweden Poland Greece Austria".split(),
    "Asia": "China Japan India Thailand Vietnam Nepal Pakistan Iran".split(),
    "Africa": "Egypt Kenya Nigeria Ghana Morocco Uganda Senegal".split(),
    "South America": "Brazil Argentina Chile Peru Colombia Ecuador Uruguay".split(),
    "North America": "Canada Mexico Cuba".split(),
}

CITIES = sorted(CAPITALS.values())

_ON = "b c d f g h j k l m n p r s t v w z br dr fl gr kr pl st tr sh ch th".split()
_VO = "a e i o u ai ea oo ou".split()
_CO = "n r l s t m k d p x nd st rk ng".split()


def pseudo(rng: random.Random, n: int | None = None) -> str:
    """A made-up word of 1-3 syllables."""
    s = ""
    for _ in range(n or rng.choice((1, 2, 2, 2, 3))):
        s += rng.choice(_ON) + rng.choice(_VO)
        if rng.random() < 0.4:
            s += rng.choice(_CO)
    return s


def letters(rng: random.Random, n: int) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(n))


def chunks(rng: random.Random) -> str:
    """Pieces of real words put together, so that every token is met inside other words."""
    s = ""
    for _ in range(rng.randint(1, 3)):
        w = rng.choice(WORDS)
        i = rng.randrange(max(1, len(w) - 2))
        s += w[i : i + rng.randint(2, 5)]
    return s


WHOLE = {"friend", "friendly", *COMMON}  # tokens of their own: their letters can only be learned from themselves


def word(rng: random.Random, want: bool | None = None, p_real: float = 0.6) -> str:
    """A word; `want` selects the held-out (True) or the training (False) part, None either."""
    while True:
        r = rng.random()
        q = (r - p_real) / (1 - p_real)
        w = (
            rng.choice(WORDS)
            if q < 0
            else pseudo(rng)
            if q < 0.5
            else chunks(rng)
            if q < 0.8
            else letters(rng, rng.randint(3, 8))
        )
        if want is None or (held("word:" + w) and w not in WHOLE) == want:
            return w


def name(rng: random.Random, want: bool | None = None) -> str:
    while True:
        r = rng.random()
        w = (
            rng.choice(NAMES)
            if r < 0.6
            else pseudo(rng, 2).capitalize()
            if r < 0.8
            else rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") + pseudo(rng, rng.choice((1, 2)))[rng.randint(0, 1) :]
        )
        if want is None or held("name:" + w) == want:
            return w


def city(rng: random.Random, want: bool | None = None) -> str:
    while True:
        c = (
            rng.choice(CITIES)
            if rng.random() < 0.4 and not want
            else name(rng)
            if rng.random() < 0.2
            else pseudo(rng).capitalize()
        )
        if want is None or held("city:" + c) == want:
            return c


def number(rng: random.Random, want: bool | None, digits: int) -> int:
    """A number of up to / exactly that many digits whose key is (not) held out."""
    while True:
        v = rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        if digits < 4 or want is None or held(f"number:{v}") == want:
            return v


_ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen""".split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_words(n: int) -> str:
    if n < 20:
        return _ONES[n]
    if n < 100:
        return _TENS[n // 10] + ("-" + _ONES[n % 10] if n % 10 else "")
    if n < 1000:
        return _ONES[n // 100] + " hundred" + (" and " + in_words(n % 100) if n % 100 else "")
    return in_words(n // 1000) + " thousand" + (" " + in_words(n % 1000) if n % 1000 else "")
