"""English words of four to seven letters for RULER's tasks: keys of an adjective and a noun, and lists of all words.

RULER takes them from the package wonderwords, whose lists are longer. Seven letters are the limit, so that ten numbered
words fit in the 120 tokens of an answer if a token is a byte.
"""

# fmt: off
_ADJECTIVES = """
able absent acid active actual adult afraid aged agile alert alive amber ample ancient angry annual anxious arid
artful ashen atomic awake aware awful azure bare basic beige bitter bland blank bleak blind blond blue blunt bold
bonus bored bossy brave brief bright brisk broad broken bronze brown bulky bumpy burly busy calm candid capable
careful casual central certain cheap cheery chief chilly civil classic clean clear clever close cloudy clumsy
coastal cold comfy common compact complex content cool coral correct costly cozy crafty crazy creamy crimson crisp
crude cruel crunchy curious curly current curved cute daily damp daring dark dear decent deep defiant dense digital
direct dirty distant dizzy docile dopey double drab dreary dull dusty dutiful eager early earnest earthy easy eerie
elastic elated elder elegant elite empty endless entire equal exact exotic expert extra fabled faded faint fair
famous fancy fast fatal feeble fertile fierce fiery filthy final fine firm fixed flaky flat fleet flimsy fluffy
fluid foamy fond foolish foreign formal frail frank free fresh frosty frozen frugal full funny fussy fuzzy gaunt
general generic gentle genuine giant giddy gifted giving glad gleeful global gloomy glossy golden good grand grassy
grave gray great greedy green grim gritty gross grouchy grubby grumpy guilty gusty hairy handy happy hardy harsh
hasty hazel hazy healthy hearty heavy hefty helpful hidden high hilly hoarse hollow honest honored hopeful huge
humble humid hungry ideal idle immense inborn infant innate inner intact intense ironic ivory jaded jagged jaunty
jealous jittery joint jolly jovial joyful juicy jumbo jumpy junior keen kind kindly known lame lanky large last late
lavish lawful lazy leading leafy lean legal level light likable likely limp linear little lively living local lofty
lone lonely long loose loud lovable lovely loving loyal lucid lucky lumpy magenta main major married massive mature
meager mealy mean meaty medical mellow merry messy mild milky minor minty misty mixed mobile modern modest moist
monthly moral muddy mundane murky musical muted mutual naive narrow nasty natural naughty neat needy nervous nice
nifty nimble noble noisy normal notable novel nutty oblong obvious oily olive open optimal orange orderly organic
ornate outer oval overt pale past patchy patient peppy perfect petite pink placid plain playful pleased pliable
plump plush pointed polite poor popular portly posh potable precise pretty prickly prime private prize prompt proper
proud prudent public puny pure purple puzzled quaint quick quiet quirky radiant ragged rapid rare rash ready real
recent regal regular remote ripe robust rocky rosy rotten rough round rowdy royal rubbery ruby rude runny rural
rusty safe salty sandy sane scaly scarce scarlet secret secure select serene serious severe shabby shadowy shady
shaky shallow sharp shiny short showy shrill silent silky silly silver simple sincere single skinny sleepy slight
slim slimy slow small smart smooth smug snappy sneaky soft soggy solar solid somber sore sour sparkly sparse special
speedy spicy spotted square stable staid stark static steady steel steep sticky stiff stingy stormy strange strict
striped strong sturdy subdued subtle sudden sugary sunny super superb supple sure surly sweet swift tall tame tart
tasty taut tedious teeming tender tense tepid thick thin third thirsty thorny tidy tight tinted tiny tired torn
total tough tragic trained tricky trim trivial true trusty twin typical ugly unfit uniform unique united unknown
unlined unripe untidy unused upbeat upper urban urgent used useful useless usual utter vacant vague vain valid vapid
vast velvety verdant vibrant vicious violet virtual visible vital vivid warm wary watery wavy weak wealthy weary
weekly weird white whole wicked wide wild willing wilted windy winged wiry wise witty woeful wooden woolly worldly
worn worried worthy yearly yellow young zany zealous zesty zigzag
"""
_NOUNS = """
abbey ability account acorn acre action actor address advice affair agency agenda agent aisle alarm album alcove
alley almond amount anchor angel animal ankle answer antler anvil apple apricot apron arcade arch archer area arena
armor army arrow artist aspen asset athlete atlas atom attic auction author autumn avenue award awning axis axle
baby badge badger bagel baker balance balcony ballad ballet balloon bamboo banana bandage bandit banjo bank banker
banner barber bargain barley barn baron barrel barrier basil basin basket bass bath battery battle beach beacon bead
beaker beam bean bear beard beast beaver bedroom beef beetle belief bell belt bench berry bicycle birch bird biscuit
bishop bison blade blanket blaze blimp blister block blossom blouse board boat body bolt bone bonfire bonnet book
booklet boot border bottle boulder bouquet bowl boxer bracket brain branch brass bread breath breeze brick bride
bridge bridle brook broom brother brush bubble bucket buckle budget buffalo buffet bugle builder bulb bullet bumper
bundle bunker burger bushel butcher butler butter button cabbage cabin cabinet cable cactus cafe cage cake calf
camel camera camp campus canal canary candle candy cannon canoe canopy canvas canyon cape capital captain caravan
carbon card career cargo carol carpet carrot cart carton cascade castle catalog cattle cavern cedar ceiling cellar
cello cement census center century cereal chain chair chalk chamber channel chapel chapter charity chart cheese chef
cherry chess chest chicken chimney chin chisel choir chorus cider cinema circle circuit circus citizen city clam
class claw clay clerk cliff climate clinic cloak clock closet cloth cloud clover clown club coach coal coast cobbler
coconut coffee coin collar college colony column comet comic compass concert cone contest convent cook cookie copper
copy cord cork corn corner cottage cotton couch council country county coupon cousin cowboy crab cracker cradle
crane crater crayon cream credit creek crest crew cricket crocus crop cross crow crowd crown cruise crumb crust
crystal cube cuckoo culture curb current curtain curve cushion custard custom cycle cyclone cymbal dairy daisy
dancer danger data date dealer debate debt decade deck deer degree delta denim dentist deputy desert design desk
dessert device dial diamond diary dice diet dinner diploma dish disk ditch diver doctor dolphin domain dome donkey
donor door dough dove dozen dragon drama drawer dream dress drill driver drum duchess duck duel duet duke dune dusk
dust eagle easel echo eclipse edge edition editor effort elbow elder element ember emblem emperor empire energy
engine enigma episode equator error escape essay estate evening event exam exhibit exit expert eyebrow fable fabric
factor factory fairy falcon family farm farmer fashion father faucet feast feather fence fender fern ferry fever
fiber fiddle field figure film filter finch finger fire fish fisher flag flame flask flax fleece flesh flight flint
float flood floor florist flour flower flute foam folder folk food foot forest fork form fort fortune forum fossil
frame freight friend frigate fringe frog frost fruit fuel funnel furnace future gadget galaxy gallery gallon gander
garage garden garland garlic garment gate gazebo gazelle gecko geese gender genius geyser ghost ginger giraffe
girdle glacier glass globe glove glue gnome goat gondola goose gorge gorilla gospel gown grain granary grape graph
grass gravel gravity griffin grill grocer ground group grove guard guest guide guitar gulf gull habit hail hair hall
halo hammer hammock hamster hand handle hangar harbor hare harness harp harvest hatchet haven hawk hazard head heart
hearth heaven hedge heel heir helmet help herald herb herd hermit hero heron highway hill hinge history hobby hockey
holiday holly home honey hood hoof hook horizon horn hornet horse hose host hostel hotel hour house human hunter
hurdle husband hyena iceberg icicle icon idea igloo image impulse inch income index infant inlet insect island item
jacket jaguar janitor jasmine jazz jelly jersey jester jewel jockey journal journey judge juggler juice jungle
juniper jury kayak kennel kernel kettle keyhole kidney king kingdom kiosk kitchen kite kitten knee knife knight knot
koala label lace ladder ladle lady lagoon lake lamb lamp lance land lane lantern lapel laptop larch lark laser latch
lava lawn lawyer layer leader leaf league leather lecture ledge legend lemon lens lentil leopard lesson letter
lettuce library lichen life lily limb lime limit linen lion list litter lizard llama lobby lobster locket locust
lodge lotus lounge luggage lumber lunch lung lute lynx lyric machine magic magnet maiden mail mall mammal mammoth
manager mango manor mansion mantle maple marble march margin marina market marsh mask mason mast master match matter
meadow meal measure meat medal medium melody melon member memory mentor menu mermaid message metal meteor meter
method midday mile milk mill miller mineral mint minute miracle mirror mission mist mitten moat model mole moment
monarch money monitor monk monkey monsoon month mood moon moose morning mortar mosaic moss motel moth mother motor
mouse mouth movie muffin mule muscle museum music musket mustang mustard mystery myth nail name napkin nation nature
navy neck nectar needle nephew nerve nest network neutron news newt nickel niece night noodle noon north nose novel
nugget number nurse nutmeg oasis oath object oboe ocean octopus office officer olive omelet onion opera orange orbit
orchard orchid order oregano organ osprey ostrich otter outfit outlet oven owner oxygen oyster packet paddle page
pageant pail paint pajamas palace palette palm pancake panda panel panic panther pantry papaya paper parade parcel
parent park parrot parsley parsnip partner party passage pasta paste pastry pasture path patio patrol pattern peach
peacock peak peanut pear pearl peasant pebble pecan pedal pelican pencil penguin penny people pepper perch perfume
period person pest petal phone photo phrase piano pickle picnic picture piece pier pigeon pillar pillow pilot pine
pioneer pipe pirate piston pitch pitcher pizza place plain planet plank plant plate plateau player plaza plot plow
plum plumber pocket poem poet point poker pole police pollen pond pony poodle pool poplar poppy porch port porter
portion post postage poster potato potion potter pottery pouch powder prairie prayer preface present priest prince
printer prism prison problem process product profile profit program project promise proof prose protein pudding
puddle pulley pulse puma pumpkin pupil puppet puppy purse puzzle pyramid python quail quarry quart quarter quartz
queen quest quilt quince quiver quiz quota rabbit raccoon radar radio radish raft rail railway rain rainbow raisin
ranch range ranger raven ravine razor reason recipe record reef referee region relic remedy reptile rescue resort
result reward rhino rhyme rhythm ribbon rice riddle rider rifle ring ripple river road robe robin robot rock rocket
rodent roof room rooster root rope rose rubber rudder ruler runner runway saddle safari saffron sage sail sailor
salad salary salmon salon salt salute sample sand sandal sapling satchel satin saucer sauna sausage savanna scale
scallop scarf scene scent scepter scholar school science scooter scout scroll seal season seat secret section seed
segment senator series sermon servant session shadow shaft shampoo shape shark shawl sheep sheet shelf shell shelter
sheriff shield ship shirt shoe shop shore shovel shower shrimp shrub shutter sibling sickle siege signal silk silo
singer sink siren sister skater sketch skirt skull slate sled sleeve slice slipper slogan slope sloth smoke snack
snail snake snow soap soccer society sock sofa soil soldier solo sonnet soul sound soup south spade span spaniel
sparrow speaker spear species speech sphere spice spider spike spinach spine spiral spire spirit sponge spoon sport
spring sprout spruce squad squash squid stable stadium staff stage stairs stamp stanza star starch station statue
steam steel stem step steward stick stomach stone stool storage store stork storm story stove strand straw stream
street string student studio study sugar suit sultan summer summit sunrise sunset supper surface surgeon swallow
swamp swan sweater swing sword symbol syrup system table tablet tailor talent tango tank tape target tariff task
tavern taxi teacher team teapot temper temple tennis tent terrace test text texture theater theme theory thesis
thimble thistle thorn thread throat throne thumb thunder ticket tide tiger tile timber tissue title toad toast
tobacco toffee tomato tongue tool tooth topic torch tornado torso tower town tractor trade trader tragedy trail
train trait trapeze travel tray treaty tree trench trial tribe trident trigger tripod trolley trophy trout truck
trumpet trunk truth tuba tube tulip tuna tundra tunic tunnel turban turbine turkey turnip turtle tutor twig twin
typist tyrant uncle unicorn union unit urchin user usher utensil vaccine vacuum valley value valve vanilla vapor
vase vault vehicle veil velvet vendor veranda verse vessel vest veteran viaduct victory video view viking villa
village vine vinegar viola violin viper virtue visitor vitamin voice volcano volley volume voter vowel voyage
vulture waffle wagon waist waiter wallet walnut walrus warden warrior wasp watch water wave wealth weapon weather
weaver wedding wedge week weevil weight whale wharf wheat wheel whisker whistle widow wife willow window wine wing
winner winter wire wisdom witness wizard wolf woman wombat wonder wood wool word worker world worm wreath wren
wrench wrist writer yacht yard yarn year yeast yogurt youth zebra zenith zephyr zinc zipper zodiac zone
"""
_VERBS = """
absorb accept accuse achieve acquire adapt adjust admire admit adopt adore advance advise afford agree allow alter
amaze amuse annoy appeal appear applaud apply approve argue arrange arrest arrive ascend assist assume assure attach
attack attain attempt attend attract avoid awake bake banish bathe become begin behave belong bend betray bind bite
bleed blend bless blink blow blur boast boil borrow bounce brag break breathe breed brew bribe bring bruise build
bump burn burst bury buzz call cancel care carve cast catch cause cease chase chat chatter check cheer chew choose
chop circle claim clap clean cleanse climb cling clip collect collide comb combine come command comment commit
compare compete compile compose compute conceal concern conduct confess confirm confuse connect conquer consent
consist consult consume contain control convert convey convict cope correct cough count cover crack crash crawl
create creep croak crush cuddle cure curl dance dangle dare dart dawdle dazzle deal decay deceive decide declare
decline defeat defend define delay delete delight deliver demand deny depart depend deploy derive descend deserve
desire destroy detach detect detest develop devote devour dictate differ digest dine discuss dismiss display disturb
dive divide donate doubt drag drain draw drift drink drip drop drown dwell earn educate elect embark embrace emerge
emit employ enable enclose endure enforce engage engrave enhance enjoy enlarge enlist enrich enroll ensure enter
entice erase erect erode erupt evade evolve examine exceed excite exclude excuse execute exist expand expect expel
explain explode explore export expose express extend extract face fade fail faint fall fasten fear feed feel fetch
fight fill find finish flap flash flatten flatter flee fling flip flow flutter fold follow forbid force forget
forgive form freeze frown fumble gain gallop gamble gasp gather gaze giggle give glance gleam glide glimpse glow
gnaw govern grab grant grasp graze greet grin grind groan grow growl grumble guess gulp hang happen harass hate haul
heal hear heat hide hint hire hiss hold hope hover howl hunt hurl hurry hurt ignite ignore imagine imitate impress
improve include infect inflate inform inhale inherit inject injure inquire insert insist inspect inspire install
insult intend invade invent invest invite invoke isolate itch jeer join joke jostle jump justify keep kick kiss
kneel knit knock know land laugh launch lead leak lean leap learn leave lend license lick lift limp linger link
listen load loan loiter look loosen lose love lower lurk make manage march marry marvel master mature measure meddle
meet melt mend mention mimic mingle mislead miss moan mock modify mourn move muddle mumble murmur mutter narrate
need neglect nibble notice notify obey oblige observe obtain occupy occur offend offer omit operate oppose ordain
outwit overlap pacify pack paddle paint pamper pant pardon part pass paste pause pave peck peel peep perform permit
persist phone pick pierce pinch plan plant play plead please pledge pluck plunge poke polish ponder possess pour
praise pray preach precede predict prefer prepare press pretend prevail prevent prick print probe proceed produce
profess prolong promote propel propose protect protest prove provide prune publish pull pump punch punish purify
pursue push qualify quarrel quit quote race radiate raise ramble rattle reach react read realize reap rebel rebuild
recall receive recite reckon recline record recover recruit recycle reduce refer refine reflect reform refrain
refresh refuse regain regard regret reign reject rejoice relate relax release rely remain remark remind remove
render renew rent repair repeat repel replace reply report request require reside resign resist resolve respect
respond rest restore retain retire retreat return reunite reveal revenge reverse review revise revive revolve ride
rinse rise risk roam roar roast roll rotate ruin rush sail salute satisfy save savor scald scan scare scatter scold
scorch scrape scratch scream screech scrub search seek seem seize sell send serve settle shake share shatter shave
shed shelter shift shine shiver shock shoot shout show shred shrink shrug shun shut sigh simmer sing skate skid skip
slam slap slash sleep slide slip slither slouch slump smash smell smile snarl snatch sneak sneer sneeze sniff snooze
snore snort snuggle soak soar solve soothe sort span spare spark sparkle speak spell spend spill spin splash split
spoil spray spread sprint squeak squeal squeeze squint stain stand stare start startle starve stay steal steer stir
stitch stoop stop strain strap stray stretch stride strike strip stripe strive stroll stuff stumble stun submit
succeed suck suffer suggest sulk supply support suppose surf surge surpass survive suspect suspend sustain swap sway
swear sweat sweep swell swerve swim swirl switch tackle take talk tame taste teach tear tease tell tempt tend
terrify thank thaw think thrive throb throw thrust thwart tickle tilt tire toil topple toss touch tour trace train
trample trap treat tremble trick trickle trim trip trot trouble trudge trust tuck tumble turn twinkle twirl twist
type undo undress unfold unite unlock unpack unveil uphold upset urge utilize utter vanish vary venture verify view
visit vote vouch wade waft wail wait waive wake walk wander want warble warm warn wash waste watch wave waver weave
weep weigh welcome whine whip whirl whisper widen wilt wince wink wipe wish wither wobble wonder work worry worship
wrap wreck wrestle wriggle write yawn yearn yell yelp yield zoom
"""
# fmt: on
ADJECTIVES, NOUNS, VERBS = (tuple(words.split()) for words in (_ADJECTIVES, _NOUNS, _VERBS))
WORDS = tuple(sorted({*ADJECTIVES, *NOUNS, *VERBS}))
