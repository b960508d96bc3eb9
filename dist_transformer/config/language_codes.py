"""Codes of languages in any of their spellings, and the tokenisers of sacreBLEU by language."""

import re

# ISO 639-1, and what counts as the same language: codes of ISO 639-2 and 639-3; the member of a macrolanguage that its
# plain code mostly means (cmn is Mandarin, lvs Latvian); and mistakes that are common.
_CODES = (
    "aa:aar ab:abk ae:ave af:afr ak:aka am:amh an:arg ar:ara,arb as:asm av:ava ay:aym az:aze,azj ba:bak be:bel "
    "bg:bul bi:bis bm:bam bn:ben bo:bod,tib br:bre bs:bos ca:cat ce:che ch:cha co:cos cr:cre cs:ces,cze cu:chu "
    "cv:chv cy:cym,wel da:dan de:deu,ger dv:div dz:dzo ee:ewe el:ell,gre en:eng eo:epo es:spa et:est,ekk eu:eus,baq "
    "fa:fas,per,pes ff:ful fi:fin fj:fij fo:fao fr:fra,fre fy:fry ga:gle gd:gla gl:glg gn:grn,gug gu:guj gv:glv "
    "ha:hau he:heb hi:hin ho:hmo hr:hrv ht:hat hu:hun hy:hye,arm hz:her ia:ina id:ind ie:ile ig:ibo ii:iii ik:ipk "
    "io:ido is:isl,ice it:ita iu:iku ja:jpn,jp jv:jav ka:kat,geo kg:kon ki:kik kj:kua kk:kaz kl:kal km:khm kn:kan "
    "ko:kor kr:kau,knc ks:kas ku:kur,kmr kv:kom kw:cor ky:kir la:lat lb:ltz lg:lug li:lim ln:lin lo:lao lt:lit "
    "lu:lub lv:lav,lvs mg:mlg,plt mh:mah mi:mri,mao mk:mkd,mac ml:mal mn:mon,khk mr:mar ms:msa,may,zsm mt:mlt "
    "my:mya,bur na:nau nb:nob nd:nde ne:nep,npi ng:ndo nl:nld,dut nn:nno no:nor nr:nbl nv:nav ny:nya oc:oci oj:oji "
    "om:orm,gaz or:ori,ory os:oss pa:pan pi:pli pl:pol ps:pus,pbt,pbu pt:por qu:que,quy rm:roh rn:run ro:ron,rum "
    "ru:rus rw:kin sa:san sc:srd sd:snd se:sme sg:sag si:sin sk:slk,slo sl:slv sm:smo sn:sna so:som sq:sqi,alb,als "
    "sr:srp ss:ssw st:sot su:sun sv:swe sw:swa,swh ta:tam te:tel tg:tgk th:tha ti:tir tk:tuk tl:tgl,fil tn:tsn "
    "to:ton tr:tur ts:tso tt:tat tw:twi ty:tah ug:uig uk:ukr ur:urd uz:uzb,uzn ve:ven vi:vie vo:vol wa:wln wo:wol "
    "xh:xho yi:yid,ydd yo:yor za:zha zh:zho,chi,cmn,cn zu:zul"
)
_SHORT = {
    other: short
    for short, _, others in (entry.partition(":") for entry in _CODES.split())
    for other in others.split(",")
}
# Every other language uses mteval's tokeniser, "13a". For Japanese and Korean sacreBLEU also has dictionary tokenisers,
# which need more packages; "char" needs none. The signature names the tokeniser.
_TOKENIZERS = dict.fromkeys(("ja", "ko", "th", "lo", "km", "my", "shn", "bo", "dz"), "char") | dict.fromkeys(
    ("zh", "yue", "wuu", "nan", "hak", "gan", "hsn", "cdo", "cjy", "lzh"), "zh"
)


def bleu_tokenizer(language: str) -> str:
    """Return sacreBLEU's tokeniser for text of `language`, such as "de", "zh", "zh-CN" or "zho_Hans"."""
    base, *others = _subtags(language)
    # Romanised text, such as pinyin, has spaces.
    return "13a" if "Latn" in others else _TOKENIZERS.get(base, "13a")


def base_language(language: str) -> str:
    """Return the language alone by its shortest code: `zh_Hant`, `zho_Hans` and `cmn` → `zh`, `yue_Hant` → `yue`."""
    return _subtags(language)[0]


def language_tag(language: str) -> str:
    """Return a code in the spelling of BCP 47: `zho_Hans` → `zh-Hans`, `en_us` → `en-US`; other names as they are."""
    return "-".join(_subtags(language))


def is_same_language(one: str, other: str) -> bool:
    """Return whether two codes may mean one language: script and region count only if both state them."""
    (base, *others), (other_base, *more) = _subtags(one), _subtags(other)
    return base == other_base and (others == more or not others or not more)


def _subtags(language: str) -> list[str]:
    """Split a code into language, script and region, in the spelling of BCP 47; another name is one part."""
    base, *others = re.split("[-_]", language)
    if not re.fullmatch("[A-Za-z]{2,3}", base):
        return [language]
    spelled = (part.title() if len(part) == 4 else part.upper() if len(part) < 4 else part for part in others)
    return [_SHORT.get(base.lower(), base.lower()), *spelled]
